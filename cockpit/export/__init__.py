"""Export of recordings to other formats, one module per family of formats; each is imported only when it is used."""
