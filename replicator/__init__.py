"""The cluster side of ckptfs. Empty until files leave their node."""
