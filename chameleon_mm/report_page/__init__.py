"""The page of a report, as one HTML file: the step by its plan, all steps, and the figures."""

from __future__ import annotations

from chameleon_mm.report_page.page import page_html
from chameleon_mm.report_page.step_picture import PlannedStepData, StepPicture, TensorRow, picture_of

__all__ = ["PlannedStepData", "StepPicture", "TensorRow", "page_html", "picture_of"]
