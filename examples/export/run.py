"""Explain a photograph with a file of `sigcam export`, without sigcam and PyTorch.

pip install onnxruntime numpy pillow
python run.py photo.jpg model.onnx overlay.png
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont, ImageOps

HEAT = np.array([[0, 0, 4], [120, 28, 109], [237, 105, 37], [252, 255, 164]])  # colours of 0, 1/3, 2/3 and 1

photograph, model, target = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
facts = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
picture = ImageOps.exif_transpose(Image.open(photograph)).convert("RGB")
outputs = session.run(None, {"image": np.asarray(picture)[None]})  # uint8 (1, H, W, 3)
found = {node.name: output[0] for node, output in zip(session.get_outputs(), outputs, strict=True)}

small = ImageOps.contain(picture, (480, 480))  # one panel for each class, side by side
grey = (np.asarray(small).mean(2, keepdims=True) + np.asarray(small)) / 2
sheet = Image.new("RGB", (small.width * len(found["classes"]), small.height + 28), "white")
pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
for rank, index in enumerate(found["classes"]):
    here = "here" if found["present"][rank] else "not here"
    text = f"{facts['class_names'][index]}: {here}, evidence {found['evidence'][index]:.3f}"
    print(f"{text}, probability {found['probability'][index]:.3f}")
    cells = Image.fromarray(found["maps"][rank])  # (P, Q), each the probability that the class is there
    heat = np.asarray(cells.resize(small.size, Image.Resampling.BILINEAR))[..., None].clip(0, 1)
    colour = np.stack([np.interp(heat[..., 0], [0, 1 / 3, 2 / 3, 1], channel) for channel in HEAT.T], -1)
    drawn = grey * (1 - 0.75 * heat) + colour * 0.75 * heat
    left = rank * small.width
    sheet.paste(Image.fromarray(drawn.astype(np.uint8)), (left, 0))
    pen.text((left + 6, small.height + 5), text, "black", font)
    if found["scores"][rank] > 0:
        x0, y0, x1, y1 = found["boxes"][rank] * small.width / picture.width
        pen.rectangle((left + x0, y0, left + x1, y1), outline="#00c853", width=3)
sheet.save(target)
