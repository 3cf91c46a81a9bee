"""Several choices of one prompt: the best of many, beams, and a choice that ends before its siblings."""

from __future__ import annotations

from .conftest import HELLO, Api, ScriptedBackend, error_of, events

WORLD = [905, 19556, 905, 2]


def test_best_of_gives_the_likeliest_first_and_counts_all(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [100 + branch, 2]
    backend.logprob = lambda branch: {1: -0.25, 3: -0.5}.get(branch, -1.0)
    reply = api.complete(prompt=["a", "b"], n=2, best_of=4, return_token_ids=True).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"][0] for choice in reply["choices"]] == [101, 103, 101, 103]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 2 * 4 * 2
    assert backend.submitted[0].params.best_of == 4
    assert backend.submitted[0].params.logprobs is None


def test_best_of_ranks_what_is_left_after_a_stop_string(api: Api, backend: ScriptedBackend) -> None:
    # Of branch 0 only the likely beginning counts, since its unlikely rest is behind the stop string.
    backend.answer = lambda request, branch: [HELLO, WORLD][branch]
    backend.logprob = lambda branch: -0.5
    reply = api.complete(best_of=2, stop=" world", logprobs=1).json()
    (choice,) = reply["choices"]
    assert choice["text"] == "Hello"
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == 2
    assert reply["usage"]["completion_tokens"] == 3


def test_best_of_is_refused_where_it_cannot_be_kept(api: Api, backend: ScriptedBackend) -> None:
    error = error_of(api.complete(n=2, best_of=3, stream=True), 400, "best_of")
    assert "stream" in error["message"]
    error_of(api.complete(prompt=["x"] * 17, best_of=128), 400, "best_of")
    error_of(api.complete(prompt=["x"] * 65, beam_width=32), 400, "beam_width")
    assert backend.submitted == []
    # As many as are returned need no ranking.
    assert len(events(api.complete(n=2, best_of=2, stream=True, max_tokens=1))) == 3
    assert api.chat(n=1, best_of=2).status_code == 200


def test_beams_carry_their_scores_in_both_shapes_streamed_and_not(api: Api, backend: ScriptedBackend) -> None:
    fields = {"beam_width": 4, "n": 2, "length_penalty": 0.5, "early_stopping": "never"}
    for send in (api.complete, api.chat):
        whole = send(**fields).json()["choices"]
        assert [choice["score"] for choice in whole] == [-0.25, -0.5]
        ends = [
            choice
            for event in events(send(**fields, stream=True))[:-1]
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        assert [choice["score"] for choice in ends] == [-0.25, -0.5]
        params = backend.submitted[-1].params
        assert (params.beam_width, params.length_penalty, params.early_stopping) == (4, 0.5, "never")
    assert "score" not in api.complete().json()["choices"][0]


def test_a_choice_that_met_its_stop_string_is_stopped_alone(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [HELLO[:2] * 4, [100] * 8][branch]
    for stream in (False, True):
        backend.stopped.clear()
        response = api.complete(n=2, max_tokens=8, stop=" world", stream=stream)
        if not stream:
            first, second = response.json()["choices"]
            assert (first["text"], first["finish_reason"]) == ("Hello", "stop")
            assert second["finish_reason"] == "length"
            assert response.json()["usage"]["completion_tokens"] == 2 + 8
        # Once, although more of its tokens were under way; the last one left needs no word.
        assert backend.stopped == [(backend.submitted[-1].request_id, 0)]
    assert api.complete(max_tokens=8, stop="Hello").json()["choices"][0]["text"] == ""
    assert len(backend.stopped) == 1


def test_the_prefix_cache_can_be_left_out(api: Api, backend: ScriptedBackend) -> None:
    api.complete()
    api.chat(use_prefix_cache=False, cache_salt="tenant")
    assert [request.use_prefix_cache for request in backend.submitted] == [True, False]
    assert [request.cache_salt for request in backend.submitted] == ["", "tenant"]
