"""What the page answers to each of its controls; all numbers and pictures come from `looking`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from sigcam.core.errors import DataError, SigcamError
from sigcam.data.labels import match_classes
from sigcam.data.sample import Samples
from sigcam.network.dual import DualBranch
from sigcam.ui.fit_job import FitJob, Stopped
from sigcam.ui.html import boxes_html, links_html, panels_html, progress_html, tops_html
from sigcam.ui.security import open_upload
from sigcam.ui.sessions import Gallery, Sessions
from sigcam.ui.sources import Request, Source, sources_of
from sigcam.ui.viewer import Viewer, disagreements

log = logging.getLogger("sigcam")
THRESHOLD = 0.4  # at first: unit maps of the clamped branch seldom reach zero
PAGE_SIZE = 24  # thumbnails at a time
LARGEST_BRANCH = 20 * 2**20  # that is handed over as a link
AT_ONCE = 8  # pictures in a batch of the data-set view


@contextmanager
def told() -> Iterator[None]:
    """Whatever goes wrong inside is said on the page in a sentence; what nobody foresaw is in the log."""
    try:
        yield
    except SigcamError as error:
        raise gr.Error(escape(str(error)), print_exception=False) from error
    except gr.Error:
        raise
    except Exception as error:
        log.exception("the page could not answer")
        said = "That did not work, for a reason that is in the server's log."
        raise gr.Error(said, print_exception=False) from error


class Page:
    """What all visitors share: networks, pictures to choose from, a fit; and what each of them looks at."""

    def __init__(
        self,
        nets: dict[str, DualBranch],
        gallery: Gallery,
        uploads: Path,
        *,
        notice: str = "",
        first: str | None = None,
        training: Callable[[], Samples] | None = None,
    ) -> None:
        self.nets, self.gallery, self.uploads = nets, gallery, uploads
        self.notice, self.training = notice, training
        self.net = next(iter(nets.values()))
        several = len(nets) > 1
        found = [s for name, net in nets.items() for s in sources_of(net, f"{name}: " if several else "")]
        self.sources = {source.name: source for source in found}
        heads = [[s for s in found if s.net is net] for net in nets.values()]
        best = next((s for s in heads[0] if s.branch == first), heads[0][0])
        beside = heads[1][0] if several else next(s for s in heads[0] if s.branch == "softmax")
        self.chosen = list(dict.fromkeys((best.name, beside.name)))  # ticked at first
        self.looks: Sessions[Viewer] = Sessions()
        self.orders: Sessions[list[int]] = Sessions()
        self.stops: Sessions[threading.Event] = Sessions()
        self.job: FitJob | None = None
        self._thumbs: dict[int, Image.Image] = {}
        self._guard = threading.Lock()

    # ------------------------------------------------------------------------------------ one picture

    def key(self, request: gr.Request) -> str:
        """Whose browser tab it is."""
        return f"{request.username or ''}:{request.session_hash}"

    def _look(
        self, request: gr.Request, name: str, picture: Image.Image, controls: tuple[Any, ...]
    ) -> list[Any]:
        """A new picture: its likely class, drawn as the controls say."""
        sources, methods, kind, shared, threshold, delta = controls
        look = Viewer(name, picture, list(dict.fromkeys(s.net for s in self.sources.values())))
        look.threshold, look.delta = float(threshold), float(delta)
        likely = look.likely(self.net)
        look.ask(self._asked([likely], sources, methods, kind, shared))
        self.looks.put(self.key(request), look)
        return [*self._shown(look), [likely]]

    def _asked(self, classes: Any, sources: Any, methods: Any, kind: str, shared: bool) -> Request:
        known = tuple(self.sources[name] for name in sources or () if name in self.sources)
        view: Any = "signed" if kind == "signed" else "evidence"
        return Request(tuple(int(k) for k in classes or ()), known, tuple(methods or ()), view, bool(shared))

    def _shown(self, look: Viewer) -> list[Any]:
        """Panels, boxes, table, and no links."""
        return [panels_html(look), self._boxes(look), self._tops(look), ""]

    def _boxes(self, look: Viewer) -> str:
        return boxes_html(look.boxes(), look.threshold)

    def _tops(self, look: Viewer) -> str:
        fitted = {s.net: s.name.partition(":")[0] for s in self.sources.values()}
        nets = {net: name for name, net in self.nets.items()}
        titles = {net: nets.get(net) or fitted[net] for net in fitted}
        return tops_html([look.top(net, title) for net, title in titles.items()], look.delta)

    def start(self, request: gr.Request) -> list[Any]:
        """What is there before anybody has clicked: the first picture; and heads fitted since the start."""
        with told():
            controls = (self.chosen, ["grad-cam"], "evidence", True, THRESHOLD, 0.0)
            shown = self._look(request, *self._first_picture(), controls)
            return [*shown, gr.update(choices=list(self.sources), value=self.chosen)]

    def _first_picture(self) -> tuple[str, Image.Image]:
        """The first picture that can be read."""
        for index in range(len(self.gallery) - 1):
            with suppress(DataError):
                return self.gallery.open(index)
        return self.gallery.open(len(self.gallery) - 1)

    def upload(
        self,
        path: str | None,
        heads: Any,
        methods: Any,
        kind: Any,
        shared: Any,
        threshold: Any,
        delta: Any,
        request: gr.Request,
    ) -> list[Any]:
        """A picture that somebody sent."""
        with told():
            if not path:
                raise DataError("no picture arrived: try again.")
            file = Path(path)
            try:
                picture = open_upload(file, self.uploads)
            except DataError as error:  # a warning, since after an error the bad file would stay in its place
                gr.Warning(escape(str(error)), title="That file cannot be shown")
                return [gr.skip()] * 5 + [None]
            controls = (heads, methods, kind, shared, threshold, delta)
            return [*self._look(request, file.name, picture, controls), None]

    def pick(
        self,
        at: Any,
        heads: Any,
        methods: Any,
        kind: Any,
        shared: Any,
        threshold: Any,
        delta: Any,
        request: gr.Request,
        event: gr.SelectData,
    ) -> list[Any]:
        """The thumbnail that was clicked, by its number on this page of the gallery."""
        with told():
            controls = (heads, methods, kind, shared, threshold, delta)
            return self._look(request, *self.gallery.open(self._number(at, event)), controls)

    def _number(self, at: Any, event: gr.SelectData) -> int:
        index = event.index
        if not isinstance(index, int) or not 0 <= index < PAGE_SIZE:
            raise DataError("there is no such picture: choose one of those shown.")
        return (int(at or 1) - 1) * PAGE_SIZE + index

    def thumbs(self, at: Any = 1) -> list[tuple[Image.Image, str]]:
        """A page of the gallery."""
        with told():
            start = (int(at or 1) - 1) * PAGE_SIZE
            return [self.thumb(i) for i in range(start, min(start + PAGE_SIZE, len(self.gallery)))]

    def thumb(self, index: int, caption: str = "") -> tuple[Image.Image, str]:
        """A small copy of a picture, and its name; grey where it cannot be read."""
        if index not in self._thumbs:
            try:
                small = self.gallery.open(index)[1]
                small.thumbnail((128, 128))
            except (SigcamError, OSError):
                small = Image.new("RGB", (128, 128), "#888888")
            if len(self._thumbs) > 2000:
                self._thumbs.clear()
            self._thumbs[index] = small
        return self._thumbs[index], caption or self.gallery.sample(index).id

    def redraw(
        self, classes: Any, sources: Any, methods: Any, kind: str, shared: bool, request: gr.Request
    ) -> list[Any]:
        """Other classes, heads, methods or colours of the same picture."""
        with told():
            look = self.looks.get(self.key(request))
            look.ask(self._asked(classes, sources, methods, kind, shared))
            return self._shown(look)

    def move_box(self, threshold: float, request: gr.Request) -> str:
        """The boxes at another threshold."""
        with told():
            look = self.looks.get(self.key(request))
            look.threshold = min(max(float(threshold), 0.0), 1.0)
            return self._boxes(look)

    def move_head(self, delta: float, request: gr.Request) -> list[str]:
        """The maps of a softmax head that is shifted."""
        with told():
            look = self.looks.get(self.key(request))
            look.shift(min(max(float(delta), -5.0), 5.0))
            return [panels_html(look), self._boxes(look), self._tops(look)]

    def links(self, request: gr.Request) -> str:
        """What is shown, as files."""
        with told():
            return links_html(self.looks.get(self.key(request)).files())

    # ---------------------------------------------------------------------------------- many pictures

    def sort(self, first: str, second: str, most: float, request: gr.Request) -> Iterator[list[Any]]:
        """The gallery's pictures, those whose two maps have least in common first."""
        with told():
            pair = [self.sources[name] for name in (first, second) if name in self.sources]
            if len(pair) < 2 or pair[0] == pair[1]:
                raise DataError("choose two different heads to compare.")
            stop = threading.Event()
            self.stops.put(self.key(request), stop)
            count, found, unread = min(int(most), len(self.gallery)), list[tuple[float, int]](), 0
            for start in range(0, count, AT_ONCE):
                opened = list[tuple[int, Image.Image]]()
                for i in range(start, min(start + AT_ONCE, count)):
                    try:
                        opened.append((i, self.gallery.open(i)[1]))
                    except (SigcamError, OSError):
                        unread += 1
                if opened:
                    scores = disagreements(pair[0], pair[1], [picture for _, picture in opened])
                    found += [(score, i) for score, (i, _) in zip(scores, opened, strict=True)]
                found.sort(reverse=True)
                done = min(start + AT_ONCE, count)
                said = f"{done} of {count} pictures" + (f", {unread} of them unreadable" if unread else "")
                self.orders.put(self.key(request), [i for _, i in found])
                ended = stop.is_set() or done == count
                yield [progress_html(said + (": done" if ended else ""), done, count), self._ranked(found)]
                if ended:
                    return

    def _ranked(self, found: list[tuple[float, int]]) -> list[tuple[Image.Image, str]]:
        return [self.thumb(i, f"{score:.3f} {self.gallery.sample(i).id}") for score, i in found[:PAGE_SIZE]]

    def stop_sort(self, request: gr.Request) -> None:
        """Ends it after the batch in flight."""
        with told():
            self.stops.get(self.key(request)).set()

    def pick_ranked(
        self,
        heads: Any,
        methods: Any,
        kind: Any,
        shared: Any,
        threshold: Any,
        delta: Any,
        request: gr.Request,
        event: gr.SelectData,
    ) -> list[Any]:
        """A picture of the sorted view, opened beside its controls."""
        with told():
            controls = (heads, methods, kind, shared, threshold, delta)
            order, index = self.orders.get(self.key(request)), event.index
            if not isinstance(index, int) or not 0 <= index < len(order):
                raise DataError("there is no such picture: choose one of those shown.")
            shown = self._look(request, *self.gallery.open(order[index]), controls)
            return [*shown, gr.Tabs(selected="look")]

    # ------------------------------------------------------------------------------------------ a fit

    def fit(self) -> Iterator[list[Any]]:
        """A branch fitted on the folder, beside the others: how far it is, then how good."""
        with told():
            with self._guard:
                if self.job and self.job.running:
                    raise DataError("a fit is under way: wait for it, or stop it first.")
                assert self.training is not None
                samples = match_classes(self.training(), self.net.classes, self.net.class_names)
                self.job = job = FitJob.beside(self.net, samples)
                job.start()
            while job.running:
                yield [
                    progress_html(f"{job.stage}: {job.done} of {job.total}", job.done, job.total),
                    "",
                    gr.skip(),
                ]
                job.wait(0.25)
            if isinstance(job.error, Stopped):
                yield [progress_html("stopped; nothing has changed"), "", gr.skip()]
                return
            if job.error is not None:
                raise job.error
            yield self._fitted(job)

    def _fitted(self, job: FitJob) -> list[Any]:
        assert job.result is not None
        source = Source("fitted here: sigmoid branch", job.net, "sigmoid")
        self.sources[source.name] = source
        quality, seconds = job.result.quality, sum(job.result.seconds.values())
        said = f"done in {seconds:.1f} s on {job.result.images} images"
        if quality:
            said += f"; held-out mean average precision {quality.mean_average_precision:.3f}"
        said += ". It is among the heads now, until the page is stopped."
        return [progress_html(said), self._branch_link(job.net), gr.update(choices=list(self.sources))]

    def _branch_link(self, net: DualBranch) -> str:
        import tempfile

        size = sum(t.numel() * t.element_size() for t in net.state_dict().values())
        if size > LARGEST_BRANCH:
            return progress_html(
                "The branch is too large to hand over here: make the file with `sigcam fit`."
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "branch.safetensors"
            net.save(path)
            return links_html({path.name: path.read_bytes()})

    def stop_fit(self) -> None:
        """Ends the fit at its next step."""
        if self.job:
            self.job.stop()

    def leave(self, request: gr.Request) -> None:
        """The tab was closed: nothing of it is kept."""
        for held in (self.looks, self.orders, self.stops):
            held.drop(self.key(request))
