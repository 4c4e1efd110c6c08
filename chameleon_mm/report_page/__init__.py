"""The page of a report: what was planned, what was measured, as one HTML file."""

from __future__ import annotations

from chameleon_mm.report_page.measured_step import MeasuredStep, latest_step
from chameleon_mm.report_page.page import PageData, page_html
from chameleon_mm.report_page.step_picture import PlannedStepData, StepPicture, TensorRow, picture_of

__all__ = ["MeasuredStep", "PageData", "PlannedStepData", "StepPicture", "TensorRow", "latest_step", "page_html", "picture_of"]
