"""Triton kernels, each with a torch reference. Importing this package does not import Triton; importing its modules does."""
