"""Serve a file of `sigcam export`: a picture in; classes, evidence and boxes out; what waits shares a batch.

pip install fastapi uvicorn onnxruntime numpy pillow
SIGCAM_MODEL=model.onnx SIGCAM_TOKEN=secret uvicorn serve:app --limit-concurrency 64 --timeout-keep-alive 75
curl -H "Authorization: Bearer secret" --data-binary @photo.jpg http://127.0.0.1:8000/explain
"""

import asyncio
import contextlib
import io
import json
import os
import secrets
import signal

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from PIL import Image, ImageOps
from starlette.requests import ClientDisconnect

BYTES, PIXELS, SECONDS, BATCH, DRAIN = 10_000_000, 40_000_000, 30, 8, 2  # the limits; DRAIN in seconds
OUTPUTS = ["classes", "present", "scores", "boxes", "probability", "evidence"]
Image.MAX_IMAGE_PIXELS = None  # ours is checked before anything is decoded
token = f"Bearer {os.environ['SIGCAM_TOKEN']}".encode()
session = onnxruntime.InferenceSession(os.environ["SIGCAM_MODEL"], providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
names, preprocess = json.loads(about["class_names"]), json.loads(about["preprocess"])
side = np.array([preprocess["width"], preprocess["height"]])
if preprocess["resize"]:
    raise SystemExit("this file crops: pictures of one batch are squashed here, so export it without a crop")
waiting, decoders, closing = asyncio.Queue(), asyncio.Semaphore(2), {}
counts = {"pictures": 0, "batches": 0}


async def run_batches():
    """Answer what waits; while one batch is computed, the next one gathers."""
    while True:
        batch = [await waiting.get()]
        while len(batch) < BATCH and not waiting.empty():
            batch.append(waiting.get_nowait())
        images, answers = zip(*batch, strict=True)
        try:
            outputs = await asyncio.to_thread(session.run, OUTPUTS, {"image": np.stack(images)})
        except Exception as error:
            _ = [answer.set_exception(error) for answer in answers]
            continue
        counts.update(pictures=counts["pictures"] + len(batch), batches=counts["batches"] + 1)
        for row, answer in enumerate(answers):
            answer.set_result([output[row] for output in outputs])


@contextlib.asynccontextmanager
async def lifespan(app):
    """On SIGTERM answer for `DRAIN` more seconds, sending everybody elsewhere; then finish what has begun."""
    loop, stop = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)  # uvicorn's

    def drain():
        closing["Connection"] = "close"
        loop.call_later(DRAIN, stop, signal.SIGTERM, None)

    loop.add_signal_handler(signal.SIGTERM, drain)
    task = loop.create_task(run_batches())
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan, openapi_url=None)


def decode(data):
    """The picture at the network's size, so that pictures of all sizes share a batch, and its own size."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"]) as picture:
            if picture.width * picture.height <= PIXELS:
                picture = ImageOps.exif_transpose(picture).convert("RGB")
                resample = Image.Resampling[preprocess["interpolation"].upper()]
                return np.asarray(picture.resize(side, resample)), np.array(picture.size)
    except Exception:
        raise HTTPException(415, "the body is not a JPEG, PNG or WebP picture that can be read") from None
    raise HTTPException(413, f"the picture has more than {PIXELS} pixels: make it smaller")


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
                    raise HTTPException(413, f"the picture has more than {BYTES} bytes: make it smaller")
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, f"the picture did not arrive within {SECONDS} seconds") from None
    async with decoders:
        image, size = await asyncio.to_thread(decode, data)
    answer = asyncio.get_running_loop().create_future()
    waiting.put_nowait((image, answer))
    classes, present, scores, boxes, probability, evidence = await answer
    corners = boxes.reshape(-1, 2)  # xy; to the picture's pixels, the last pixel to the last
    boxes = np.where(corners >= side - 1, size - 1, (corners * size / side).round()).reshape(-1, 4)
    found = [
        {
            "class": names[index] if names else str(index),
            "probability": float(probability[index]),
            "evidence": float(evidence[index]),
            "present": bool(present[rank]),
            "box": boxes[rank].tolist() if boxes[rank].any() else None,
            "score": float(scores[rank]),
        }
        for rank, index in enumerate(classes)
    ]
    return JSONResponse({"size": size.tolist(), "classes": found}, headers=closing)
