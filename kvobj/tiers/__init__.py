"""The tiers, and the wrappers that are tiers around tiers. Composed in one place, the application's composition root."""
