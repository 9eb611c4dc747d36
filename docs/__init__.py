"""Documentation: pages, numbers in them (measurements/), and the tools that make the site."""
