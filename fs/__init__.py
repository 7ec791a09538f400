"""One node's filesystem: arena, index, catalog, content and the POSIX semantics over them."""
