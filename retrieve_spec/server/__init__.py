"""Code completion for editors: HTTP dialects and LSP on top of one drafting engine."""
