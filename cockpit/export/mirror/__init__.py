"""Mirrors, which send the metrics of a live run step by step to TensorBoard, W&B, MLflow or an OpenTelemetry
collector."""
