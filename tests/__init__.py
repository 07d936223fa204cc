"""Tests, folder by folder as the packages. A package, so that helpers can be imported."""
