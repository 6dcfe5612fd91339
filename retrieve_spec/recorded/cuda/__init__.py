"""CUDA graphs of recorded passes."""
