"""Measuring Tritonite against ATen and others: cases, timing, reports."""
