"""Prints the node ids of all rows."""

from tests.contract import node_ids

print("\n".join(node_ids()))
