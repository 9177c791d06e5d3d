"""Triton kernels, called from JAX through jax-triton. Importing the package needs neither: they load with the call."""
