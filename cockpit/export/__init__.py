"""Export of recordings to other formats, one module per family of formats. A module is imported only when its format is
requested."""
