"""Documents of every format, made by the libraries that people's programs use."""

from __future__ import annotations

import docx
from fpdf import FPDF


def make_pdf(path, pages):
    pdf = FPDF()
    pdf.set_font("helvetica", size=12)
    for text in pages:
        pdf.add_page()
        if text:
            pdf.multi_cell(0, 8, text)
    pdf.output(str(path))
    return path


def make_docx(path, paragraphs):
    document = docx.Document()
    document.add_heading("A heading")
    for text in paragraphs:
        document.add_paragraph(text)
    document.save(str(path))
    return path


def make_html(path, paragraphs):
    body = "".join(f"<p>{text}</p>" for text in paragraphs)
    path.write_text(f"<html><head><title>A page</title></head><body>{body}</body></html>", encoding="utf-8")
    return path
