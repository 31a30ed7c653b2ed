"""Export of recordings to other formats, such as Parquet, Prometheus and TensorBoard. The module that writes a format
is imported only when this format is requested."""
