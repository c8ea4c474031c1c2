"""Random modules, trained by `roundpipe.compile` and by eager PyTorch, and compared in everything.

A case is the source of a few `nn.Module` classes, written statement by statement from templates, and a scenario:
several calls at several sizes, in train and eval mode, over microbatches and workers. The templates are what real
models do and what is hard to trace: views written through their base, data read by Python, state kept in
attributes, dicts and closures, hooks, regions, containers.

    python -m tests.fx.fuzz --cases 2000 --seed 1      prints how many cases were traced, retraced, ... different
    python -m tests.fx.fuzz --show 17 --seed 1         prints the source of one case and runs it
    python -m tests.fx.fuzz --untraced                 runs all of them module by module

The invariant: a case may be refused loudly, kept whole or traced again, but never gives another number.

`expressions` and `actions` hold the templates. `writer` writes one forward from them, `source` a whole model that
begins with `preamble`, `cases` draws how the model is called. `sides` runs a case both ways, `outcomes` compares.
"""
