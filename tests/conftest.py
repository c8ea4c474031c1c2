"""One operator thread and one seed for every test, so that results repeat bit for bit."""

import gc
import logging
import signal
from collections.abc import Generator

import pytest
import torch

from tests.clock import clock as clock
from tests.repeats import mark_long_cases

torch.set_num_threads(1)
# Torch writes records with stacks into this logger if anybody listens; pytest listens to those that do not propagate.
trace_log = logging.getLogger("torch.__trace")
trace_log.propagate = True
trace_log.handlers.clear()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in a shell's background; some tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests, a million objects, stay to the end: no collection of garbage looks through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None, item: pytest.Item) -> Generator[None, object, object]:
    """The same of what a file's tests have imported and keep: later tests ask for collections hundreds of times."""
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_long_cases(items)
