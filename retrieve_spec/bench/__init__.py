"""Measures acceptance and speed: replay of recorded answers, interleaved runs, reports."""
