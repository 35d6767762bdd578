"""Explain a photograph with a file of `sigcam export`, without sigcam and PyTorch.

pip install onnxruntime numpy pillow
python run.py photo.jpg model.onnx overlay.png
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont, ImageOps

if len(sys.argv) != 4:
    sys.exit(__doc__)
HEAT = np.array([[0, 0, 4], [120, 28, 109], [237, 105, 37], [252, 255, 164]])  # colours of 0, 1/3, 2/3 and 1
photograph, model, target = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
picture = ImageOps.exif_transpose(Image.open(photograph)).convert("RGB")
outputs = session.run(None, {"image": np.asarray(picture)[None]})  # uint8 (1, H, W, 3)
found = {node.name: output[0] for node, output in zip(session.get_outputs(), outputs, strict=True)}
names = json.loads(about["class_names"]) or range(len(found["evidence"]))

small = ImageOps.contain(picture, (480, 480))  # one panel for each class, side by side
grey = (np.asarray(small).mean(2, keepdims=True) + np.asarray(small)) / 2
sheet = Image.new("RGB", (small.width * len(found["classes"]), small.height + 28), "white")
pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
for rank, index in enumerate(found["classes"]):
    here = "here" if found["present"][rank] else "not here"
    text = f"{names[index]}: {here}, evidence {found['evidence'][index]:.3f}"
    print(f"{text}, probability {found['probability'][index]:.3f}")
    cells = found["maps"][rank]  # (P, Q), each the probability that the cell shows the class
    if about["scale"] == "logit":  # of a branch without background evidence: relative to the map's maximum
        cells = cells.clip(0) / max(cells.max(), 1e-6)
    heat = np.asarray(Image.fromarray(cells).resize(small.size, Image.Resampling.BILINEAR))[..., None]
    colour = np.stack([np.interp(heat[..., 0], [0, 1 / 3, 2 / 3, 1], channel) for channel in HEAT.T], -1)
    drawn = grey * (1 - 0.75 * heat) + colour * 0.75 * heat
    sheet.paste(Image.fromarray(drawn.astype(np.uint8)), (rank * small.width, 0))
    pen.text((rank * small.width + 6, small.height + 5), text, "black", font)
    x0, y0, x1, y1 = found["boxes"][rank] * small.width / picture.width
    if x1 > x0:
        pen.rectangle((rank * small.width + x0, y0, rank * small.width + x1, y1), outline="#00c853", width=3)
sheet.save(target)
