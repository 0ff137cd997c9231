"""A command that recognises the text in a PGM picture with rapidocr (PP-OCRv4 in ONNX). It reads the picture from
standard input and writes the lines of text to standard output in the format of tesseract's TSV.
`stages.extract.pdf.ocr` runs it as a script, once per picture."""

from __future__ import annotations

import sys

import numpy as np


def main() -> None:
    head, _, body = sys.stdin.buffer.read().partition(b"\n")
    width, height = map(int, head.split()[1:3])
    grey = np.frombuffer(body, np.uint8, width * height).reshape(height, width)
    import cv2
    from rapidocr_onnxruntime import RapidOCR

    cv2.setNumThreads(1)
    lines, _ = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1)(np.repeat(grey[:, :, None], 3, axis=2))
    for number, (corners, text, score) in enumerate(lines or ()):
        xs, ys = sorted(round(x) for x, _ in corners), sorted(round(y) for _, y in corners)
        place = (xs[0], ys[0], xs[-1] - xs[0], ys[-1] - ys[0])
        print(5, 1, 1, 1, number, 1, *place, f"{100 * float(score):.0f}", " ".join(text.split()), sep="\t")


if __name__ == "__main__":
    main()
