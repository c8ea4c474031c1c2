"""What is made of a graph: costs of its nodes, legal cuts, a partition, generated layers.

May use: the graph and fakes below.
Start reading: `lower`, which takes all the steps, then `partition`.
"""
