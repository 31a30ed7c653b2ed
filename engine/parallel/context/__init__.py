"""Context parallelism: sequences that are split over ranks, ring and Ulysses attention, and document masks."""
