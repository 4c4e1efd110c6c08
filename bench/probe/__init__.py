"""Questions to a machine's driver, its link and torch: `python3 -m chameleon_mm.bench.probe`, a part of `make gpu`.

    command -> copies | costs | memory | pinning      # one module per subject

Its modules use torch.cuda and CuPy directly, which nothing else outside the device layer does: they ask about what lies below
that layer, and the layer's own choices (registering or allocating, copy engine or kernel) rest on the answers.
"""
