"""All-reduce, reduce-scatter and all-gather over point-to-point messages, in several algorithms."""
