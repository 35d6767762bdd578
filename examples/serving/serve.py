"""Serve a file of `sigcam export`: a picture in; classes, evidence and boxes out; what waits shares a batch.

pip install fastapi uvicorn onnxruntime numpy pillow
SIGCAM_MODEL=model.onnx SIGCAM_TOKEN=secret uvicorn serve:app --limit-concurrency 64
curl -H "Authorization: Bearer secret" --data-binary @photo.jpg http://127.0.0.1:8000/explain
"""

import asyncio
import contextlib
import io
import json
import os
import secrets
import signal
import warnings

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from PIL import Image, ImageOps
from starlette.requests import ClientDisconnect

BYTES, PIXELS, SECONDS, BATCH, DRAIN = 10_000_000, 40_000_000, 30, 8, 2
OUTPUTS = ["classes", "probability", "evidence", "present", "scores", "boxes"]
token = f"Bearer {os.environ['SIGCAM_TOKEN']}".encode()
session = onnxruntime.InferenceSession(os.environ["SIGCAM_MODEL"], providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
names, preprocess = json.loads(about["class_names"]), json.loads(about["preprocess"])
if preprocess["resize"]:
    raise SystemExit("pictures of one batch are squashed to one size: export the file without --crop")
side, resample = np.array([preprocess["width"], preprocess["height"]]), preprocess["interpolation"].upper()
waiting, turn, decoders, counts = [], asyncio.Lock(), asyncio.Semaphore(2), {"pictures": 0, "batches": 0}
closing = {}  # a header of each answer, once the server was told to stop
Image.MAX_IMAGE_PIXELS = PIXELS
warnings.simplefilter("error", Image.DecompressionBombWarning)  # for more pixels, before they are decoded


@contextlib.asynccontextmanager
async def lifespan(app):
    """On SIGTERM answer for `DRAIN` more seconds, sending everybody elsewhere; then finish what has begun."""
    loop, stop = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)  # uvicorn's

    def drain():
        closing["Connection"] = "close"
        loop.call_later(DRAIN, stop, signal.SIGTERM, None)

    loop.add_signal_handler(signal.SIGTERM, drain)
    yield


app = FastAPI(lifespan=lifespan, openapi_url=None)


def decode(data):
    """The picture at the network's size, so that pictures of all sizes share a batch, and its own size."""
    try:
        picture = Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"])
        picture = ImageOps.exif_transpose(picture).convert("RGB")
        return np.asarray(picture.resize(side, Image.Resampling[resample])), np.array(picture.size)
    except Exception:
        raise HTTPException(422, f"send a JPEG, PNG or WebP picture of at most {PIXELS} pixels") from None


async def run(image):
    """The outputs for the image; while one batch is computed, the images that wait here make up the next."""
    waiting.append((image, answer := asyncio.get_running_loop().create_future()))
    async with turn:
        if not answer.done():
            images, answers = zip(*waiting[:BATCH], strict=True)
            del waiting[:BATCH]
            outputs = await asyncio.to_thread(session.run, OUTPUTS, {"image": np.stack(images)})
            counts.update(pictures=counts["pictures"] + len(images), batches=counts["batches"] + 1)
            for row, each in enumerate(answers):
                each.set_result([output[row] for output in outputs])
    return answer.result()


@app.get("/health")
async def health():
    return JSONResponse(counts, 503 if closing else 200, closing)


@app.post("/explain")
async def explain(request: Request):
    if not secrets.compare_digest(request.headers.get("Authorization", "").encode(), token):
        raise HTTPException(401, "send 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": "Bearer"})
    data = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > BYTES:
                    raise HTTPException(413, f"send a picture of at most {BYTES} bytes")
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, f"the picture did not arrive within {SECONDS} seconds") from None
    async with decoders:
        image, size = await asyncio.to_thread(decode, data)
    classes, probability, evidence, present, scores, boxes = await run(image)
    corners = boxes.reshape(-1, 2)  # xy; to the picture's pixels, the last pixel to the last
    boxes = np.where(corners >= side - 1, size - 1, (corners * size / side).round()).reshape(-1, 4)
    found = {"probability": probability[classes], "evidence": evidence[classes], "present": present}
    found |= {"score": scores, "box": boxes}
    rows = [{key: each[rank].tolist() for key, each in found.items()} for rank in range(len(classes))]
    rows = [{"class": names[k] if names else str(k), **row} for k, row in zip(classes, rows, strict=True)]
    return JSONResponse({"size": size.tolist(), "classes": rows}, headers=closing)
