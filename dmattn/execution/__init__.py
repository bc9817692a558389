"""How a call is run, once :mod:`dmattn.problem` has seen what it asks: from the public functions down to the device code.

Reading order: `eager` (the door of the public functions, and the way past PyTorch's dispatcher), `watching` (who keeps a call from that way),
`operators` (``torch.ops.dmattn``, and autograd for both ways), `passes` (what both do), `replay` (which repeats it on a GPU, from a `record`
that a `recorder` made and that `guards` or looks find; `private` is what they take of torch that it promises nobody), `backend` (which code
computes, and where it writes), then :mod:`dmattn.kernels`, or `torch_path` with `torch_kernel` and `sequences` (packed ones).
"""
