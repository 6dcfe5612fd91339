"""Benchmarks: replay of recorded answers, interleaved runs, reports."""
