"""A CUDA runtime without a GPU: the unmodified CUDA build of torch runs on it, and with it every CUDA line of this project.

runtime/   C++: libcudart and libcuda whose device memory is host memory and whose streams are real queues
compute    ATen's kernels of the CUDA key, each of which runs the CPU's kernel on the same memory
control    what a test asks of it: whether it is loaded, what it counted, which accesses were not ordered
"""
