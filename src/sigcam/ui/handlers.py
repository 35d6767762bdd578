"""Event handlers of the page's controls."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any, get_args

import gradio as gr
from PIL import Image

from sigcam.core.errors import ConfigError, DataError, SigcamError
from sigcam.data.sample import Samples, match_classes
from sigcam.network.dual import DualBranch
from sigcam.ui.fit_job import FitJob, Stopped
from sigcam.ui.html import (
    boxes_html,
    links_html,
    panels_html,
    progress_html,
    state_link_html,
    top_classes_html,
)
from sigcam.ui.images import ImageGallery, open_upload
from sigcam.ui.messages import sentence, show_errors
from sigcam.ui.sessions import Sessions
from sigcam.ui.sources import Source, available_methods, class_choices, sources_of, why_relative
from sigcam.ui.state import LinkState, link_number, link_query, read_link, slider_value
from sigcam.ui.viewer import PanelScale, Request, Viewer, disagreements

METHOD = "grad-cam"  # that the page opens with
THRESHOLD_INFO = (
    "The box encloses what is above this fraction of the map's maximum.",
    "The box encloses what is above this probability; in maps without an absolute scale, what is above this "
    "fraction of the maximum.",
)
MAX_DELTA = 5.0  # standard deviations of the softmax head's weights
PAGE_SIZE = 24  # thumbnails
SORT_BATCH = 8  # images
SORTED, MAX_SORTED = 64, 1000  # images
MAX_BRANCH_BYTES = 20 * 2**20  # of a branch that is offered as a link


def _session_id(request: gr.Request) -> str:
    """Identify a visitor's browser tab."""
    return f"{request.username or ''}:{request.session_hash}"


class Page:
    """Event handlers, with the state that visitors share and the state of each visitor.

    Handlers take the values of the controls: `choices` are sources, methods and scale; `controls` are these,
    the threshold and delta.

    Args:
        first: branch of the first network that is selected when the page opens; None for the recommended one.
        training: opens the data to fit a branch on.
    """

    def __init__(
        self,
        nets: dict[str, DualBranch],
        gallery: ImageGallery,
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
        per_net = [sources_of(net, f"{name}: " if several else "") for name, net in nets.items()]
        self.sources = {source.name: source for sources in per_net for source in sources}  # never mutated
        self.can_sort = training is not None or gallery.root is not None
        self.head_lists = 3 if self.can_sort else 1
        best = next((s for s in per_net[0] if s.branch == first), per_net[0][0])
        other = per_net[1][0] if several else next(s for s in per_net[0] if s.branch == "softmax")
        self.default_sources = list(dict.fromkeys((best.name, other.name)))
        absolute = any(not why_relative(self.sources[name], METHOD) for name in self.default_sources)
        self.default_scale: PanelScale = "absolute" if absolute else "unit"
        self.methods = available_methods(list(nets.values()))
        self.viewers: Sessions[Viewer] = Sessions()
        self.rankings: Sessions[list[int]] = Sessions()
        self.sort_stops: Sessions[threading.Event] = Sessions()
        self.fit_job: FitJob | None = None
        self.fit_report = ("", "")  # of the latest fit: status and link
        self.fit_error = ""  # of the latest fit, until somebody has seen it
        self._lock = threading.Lock()  # of the heads and the fit

    def load(self, request: gr.Request, query: Any = "") -> list[Any]:
        """Show the state that the address links to, or else the first readable image, and all heads,
        including those fitted since the start."""
        with show_errors():
            sources, (heads, *others) = self.sources, self._heads()
            link, classes = read_link(query), dict(class_choices(self.net))
            index = self._first_readable(link["example"])
            known = [classes[label] for label in dict.fromkeys(link["class"]) if label in classes]
            names = [name for name in dict.fromkeys(link["head"]) if name in sources] or self.default_sources
            methods = [m for m in dict.fromkeys(link["method"]) if m in self.methods] or [METHOD]
            scale = next((s for s in link["scale"] if s in get_args(PanelScale)), self.default_scale)
            delta = link_number(link["delta"], -MAX_DELTA, MAX_DELTA, 0.0)
            try:
                outputs = self._example(request, index, names, methods, scale, None, delta, classes=known)
            except ConfigError:  # too many maps
                names, methods = self.default_sources, [METHOD]
                outputs = self._example(request, index, names, methods, scale, None, delta)
            with self._viewer(request) as viewer:
                viewer.threshold = link_number(link["threshold"], 0, 1, viewer.threshold)
                outputs[1] = boxes_html(viewer.boxes(), viewer.threshold)
                values = [{**heads, "value": names}, methods, scale, self._slider(viewer), delta]
            return [*outputs, *values, *others]

    def _first_readable(self, examples: list[str]) -> int:
        """Return the index of the named example if there is one, or of the first image that can be opened."""
        count = len(self.gallery)
        named = [i for i in range(count) if self.gallery.example(i) in examples] if examples else []
        for index in (*named, *range(count - 1)):
            with suppress(DataError):
                self.gallery.open(index)
                return int(index)
        return count - 1

    def upload(self, request: gr.Request, path: str | None, *controls: Any) -> list[Any]:
        """Show an uploaded image."""
        with show_errors():
            if not path:
                raise DataError("no image arrived: try again.")
            try:
                image = open_upload(Path(path), self.uploads)
            except DataError as error:  # a warning, since after an error the bad file would stay in its place
                gr.Warning(escape(str(error)), title="This file cannot be shown")
                return [gr.skip()] * 5 + [None]
            return [*self._view(request, Path(path).name, image, *controls), None]

    def select(self, request: gr.Request, event: gr.SelectData, page: Any, *controls: Any) -> list[Any]:
        """Show the image whose thumbnail was clicked."""
        with show_errors():
            index = self._clicked(event, PAGE_SIZE) + self._page_start(page)
            return self._example(request, index, *controls)

    def redraw(self, request: gr.Request, classes: Any, *choices: Any) -> list[Any]:
        """Show other maps of the same image; return the outputs and the slider of the box threshold, which
        starts again where its meaning changes."""
        with show_errors(), self._viewer(request) as viewer:
            before = viewer.default_threshold
            try:
                viewer.update(self._map_request(classes, *choices))
            except SigcamError as error:  # a warning: after an error, gradio forgets the change that waits
                gr.Warning(escape(str(error)), title="These maps cannot be shown")
                return [gr.skip()] * 5
            if viewer.default_threshold == before:
                return [*self._outputs(viewer), gr.skip()]
            viewer.threshold = viewer.default_threshold
            return [*self._outputs(viewer), self._slider(viewer)]

    def _slider(self, viewer: Viewer) -> Any:
        """Return an update of the slider of the box threshold."""
        info = THRESHOLD_INFO[any(panel.absolute for panel in viewer.panels)]
        return gr.update(value=viewer.threshold, info=info)

    def set_threshold(self, request: gr.Request, threshold: Any) -> str:
        """Show the boxes at another threshold."""
        with show_errors(), self._viewer(request) as viewer:
            viewer.threshold = slider_value(threshold, 0, 1, viewer.threshold)
            return boxes_html(viewer.boxes(), viewer.threshold)

    def set_delta(self, request: gr.Request, delta: Any) -> list[str]:
        """Show the maps of a shifted softmax head."""
        with show_errors(), self._viewer(request) as viewer:
            viewer.shift(slider_value(delta, -MAX_DELTA, MAX_DELTA, viewer.delta))
            return self._outputs(viewer)[:3]

    def download(self, request: gr.Request) -> str:
        """Show links to files of what is shown."""
        with show_errors(), self._viewer(request) as viewer:
            return links_html(viewer.files())

    def link(self, request: gr.Request) -> str:
        """Show a link to what is shown; it names an example, never a file or an upload."""
        with show_errors(), self._viewer(request) as viewer:
            labels = [label for label, _ in class_choices(self.net)]
            state: LinkState = {
                "class": [labels[k] for k in viewer.request.classes],
                "head": [source.name for source in viewer.request.sources],
                "method": viewer.request.methods,
                "scale": viewer.request.scale,
                "threshold": round(viewer.threshold, 3),
                "delta": round(viewer.delta, 3) or "",
                "example": viewer.example,
            }
            return state_link_html(link_query(state))

    def thumbnails(self, page: Any = 1) -> list[tuple[str, str]]:
        """Return one page of the gallery."""
        with show_errors():
            start = self._page_start(page)
            return [self._thumbnail(i) for i in range(start, min(start + PAGE_SIZE, len(self.gallery)))]

    def _page_start(self, page: Any) -> int:
        """Return the index of the first image of a page of the gallery."""
        return (int(slider_value(page, 1, len(self.gallery), 1)) - 1) * PAGE_SIZE

    def _thumbnail(self, index: int, caption: str = "") -> tuple[str, str]:
        """Return the file of a small copy of an image, and its caption."""
        file = self.gallery.thumbnail(index, self.uploads / "thumbnails")
        return str(file), caption or self.gallery.sample(index).id

    def _clicked(self, event: gr.SelectData, count: int) -> int:
        index = event.index
        if not isinstance(index, int) or not 0 <= index < count:
            raise DataError("no such image: choose one of those shown.")
        return index

    def _example(self, request: gr.Request, index: int, *controls: Any, classes: Any = ()) -> list[Any]:
        """Start to view an image of the gallery."""
        name, image = self.gallery.open(index)
        about = {"example": self.gallery.example(index), "credit": self.gallery.credits.get(name, "")}
        return self._view(request, name, image, *controls, classes=classes, **about)

    def _view(
        self,
        request: gr.Request,
        name: str,
        image: Image.Image,
        *controls: Any,
        classes: Any = (),
        **about: str,
    ) -> list[Any]:
        """Start to view an image; return the outputs and the classes, by default the predicted one."""
        *choices, threshold, delta = controls
        viewer = Viewer(name, image, list(dict.fromkeys(s.net for s in self.sources.values())), **about)
        classes = list(classes) or [viewer.predicted_class(self.net)]
        viewer.delta = slider_value(delta, -MAX_DELTA, MAX_DELTA, 0.0)
        slider_value(threshold, 0, 1, 0)
        viewer.update(self._map_request(classes, *choices))
        viewer.threshold = slider_value(threshold, 0, 1, viewer.default_threshold)
        outputs = [*self._outputs(viewer), classes]
        self.viewers.put(_session_id(request), viewer)
        return outputs

    @contextmanager
    def _viewer(self, request: gr.Request) -> Iterator[Viewer]:
        """Use a visitor's viewer; other requests of the same tab wait."""
        viewer = self.viewers.get(_session_id(request))
        with viewer.lock:
            yield viewer

    def _map_request(self, classes: Any, sources: Any, methods: Any, scale: Any) -> Request:
        return Request(
            tuple(int(k) for k in classes or ()),
            tuple(self.sources[name] for name in sources or () if name in self.sources),
            tuple(methods or ()),
            scale if scale in get_args(PanelScale) else "unit",
        )

    def _outputs(self, viewer: Viewer) -> list[Any]:
        """Return panels, boxes and top classes, and clear the links."""
        names = {net: name for name, net in self.nets.items()}
        titles = {s.net: names.get(s.net) or s.name.partition(":")[0] for s in self.sources.values()}
        tables = [viewer.top_classes(net, title) for net, title in titles.items()]
        boxes = boxes_html(viewer.boxes(), viewer.threshold)
        return [panels_html(viewer), boxes, top_classes_html(tables, viewer.delta), ""]

    def sort(self, request: gr.Request, first: Any, second: Any, limit: Any) -> Iterator[list[Any]]:
        """Rank the gallery's images by the disagreement of two heads' maps, batch by batch."""
        with show_errors():
            heads = self.sources
            pair = [heads[name] for name in (first, second) if isinstance(name, str) and name in heads]
            if len(pair) < 2 or pair[0] == pair[1]:
                raise ConfigError("choose two different heads to compare.")
            stop = threading.Event()
            self.sort_stops.put(_session_id(request), stop)
            count = min(int(slider_value(limit, 1, MAX_SORTED, SORTED)), len(self.gallery))
            ranking, unreadable = list[tuple[float, int]](), 0
            for start in range(0, count, SORT_BATCH):
                done = min(start + SORT_BATCH, count)
                images = dict[int, Image.Image]()
                for index in range(start, done):
                    try:
                        images[index] = self.gallery.open(index)[1]
                    except (SigcamError, OSError):
                        unreadable += 1
                if images:
                    scores = disagreements(pair[0], pair[1], list(images.values()))
                    ranking += zip(scores, images, strict=True)
                ranking.sort(reverse=True)
                self.rankings.put(_session_id(request), [index for _, index in ranking])
                finished = stop.is_set() or done == count
                message = f"{done} of {count} images" + (f", {unreadable} unreadable" if unreadable else "")
                thumbnails = [
                    self._thumbnail(index, f"{score:.3f} {self.gallery.sample(index).id}")
                    for score, index in ranking[:PAGE_SIZE]
                ]
                yield [progress_html(message + (": done" if finished else ""), done, count), thumbnails]
                if finished:
                    return

    def stop_sort(self, request: gr.Request) -> None:
        """Stop sorting after the current batch."""
        with show_errors():
            self.sort_stops.get(_session_id(request)).set()

    def select_ranked(self, request: gr.Request, event: gr.SelectData, *controls: Any) -> list[Any]:
        """Show an image of the sorted folder, in the first tab."""
        with show_errors():
            ranking = self.rankings.get(_session_id(request))
            index = ranking[self._clicked(event, len(ranking))]
            return [*self._example(request, index, *controls), gr.Tabs(selected="view")]

    def fit(self) -> str:
        """Start to fit a new branch on the folder; it goes on if the visitor leaves."""
        with show_errors(), self._lock:
            if self.fit_job and self.fit_job.is_alive():
                raise DataError("a fit is already running: wait for it or stop it first.")
            assert self.training is not None
            samples = match_classes(self.training(), self.net.classes, self.net.class_names)
            self.fit_job = FitJob(self.net, samples, self._end_fit)
            self.fit_job.start()
        return progress_html("starting")

    async def follow_fit(self) -> AsyncIterator[list[Any]]:
        """Show the latest fit: its progress, then the quality, a link and the new head, or once its error."""
        job = self.fit_job
        while job and job.is_alive():
            message = f"{job.stage}: {job.done} of {job.total}"
            yield [progress_html(message, job.done, job.total), "", *[gr.skip()] * self.head_lists]
            await asyncio.sleep(0.25)
        status, link = self.fit_report
        yield [status, link, *self._heads()]
        if error := self.fit_error:  # a closed tab does not ask for more, so it leaves the error to others
            self.fit_error, self.fit_report = "", ("", "")
            raise gr.Error(escape(error), print_exception=False)

    def _end_fit(self, job: FitJob) -> None:
        """Add a fitted branch to the heads, and keep what is told of it to whoever opens the page."""
        link, self.fit_error = "", ""
        if job.result is not None:
            self._add_source(Source("fitted here: sigmoid branch", job.net, "sigmoid"))
            quality, seconds = job.result.quality, sum(job.result.seconds.values())
            message = f"done in {seconds:.1f} s on {job.result.images} images"
            if quality:
                message += f"; held-out mean average precision {quality.mean_average_precision:.3f}"
            message += ". The branch is listed under “Maps from” until the page is stopped."
            link = self._branch_link(job.net)
        elif isinstance(job.error, Stopped):
            message = "stopped; nothing has changed"
        else:
            assert job.error is not None
            self.fit_error = sentence(job.error)
            message = f"failed: {self.fit_error}"
        self.fit_report = (progress_html(message), link)

    def _branch_link(self, net: DualBranch) -> str:
        if sum(t.numel() * t.element_size() for t in net.state_dict().values()) > MAX_BRANCH_BYTES:
            return progress_html("The branch is too large to download here: use `sigcam fit` instead.")
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "branch.safetensors"
                net.save(path)
                return links_html({path.name: path.read_bytes()})
        except Exception as error:  # the branch is among the heads all the same
            return progress_html(f"The branch cannot be downloaded. {sentence(error)}")

    def _add_source(self, source: Source) -> None:
        """Replace the heads by a copy with one more: others may be reading them."""
        with self._lock:
            self.sources = {**self.sources, source.name: source}

    def _heads(self) -> list[Any]:
        """Return an update of every list of heads."""
        return [gr.update(choices=list(self.sources))] * self.head_lists

    def stop_fit(self) -> None:
        """Stop the fit at its next step."""
        if job := self.fit_job:
            job.stop()

    def leave(self, request: gr.Request) -> None:
        """Drop the state of a closed tab."""
        for sessions in (self.viewers, self.rankings, self.sort_stops):
            sessions.drop(_session_id(request))
