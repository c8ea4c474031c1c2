"""The compiler: a model's Python code to a graph, its costs, its cuts, its generated layers."""
