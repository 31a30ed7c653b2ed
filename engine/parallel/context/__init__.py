"""Context parallelism: sequences split over ranks, ring and Ulysses attention, masks of documents."""
