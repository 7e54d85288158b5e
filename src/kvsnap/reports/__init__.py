"""Builds pages from what inspections answer with: one self-contained HTML file, and its pictures."""
