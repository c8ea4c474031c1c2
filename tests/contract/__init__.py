"""What the library promises, row by row, and the tests that hold each promise.

A row's tests are node ids below ``tests/`` without parameters. ``gap`` says what of a row is not true yet, or is not
held by a test; it is empty for a row that holds in full. ``python -m tests.contract`` prints the node ids, for
``make test-contract``; `tests/test_contract.py` checks the table itself.
"""

from __future__ import annotations

from tests.contract.compiler_rows import COMPILER_ROWS
from tests.contract.distributed_rows import DISTRIBUTED_ROWS
from tests.contract.inference_rows import INFERENCE_ROWS
from tests.contract.row import Row
from tests.contract.runtime_rows import RUNTIME_ROWS
from tests.contract.wrap_rows import WRAP_ROWS

TABLE: dict[str, Row] = RUNTIME_ROWS | COMPILER_ROWS | WRAP_ROWS | DISTRIBUTED_ROWS | INFERENCE_ROWS


def node_ids() -> list[str]:
    """The tests of all rows, each once, as pytest takes them."""
    return sorted({f"tests/{test}" for row in TABLE.values() for test in row.tests})
