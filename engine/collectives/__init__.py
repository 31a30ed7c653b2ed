"""All-reduce, reduce-scatter and all-gather over point-to-point messages, with several algorithms."""
