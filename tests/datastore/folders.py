"""Folders of files that tests read."""


def write(root, files):
    """Files below a folder, from their texts or bytes by name; returns the folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def flip(path, at=0.5):
    """Change one bit of a file, at some share of its length; returns what it held."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(at * (len(whole) - 1))] ^= 1
    path.write_bytes(damaged)
    return whole
