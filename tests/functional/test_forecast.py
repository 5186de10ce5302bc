import torch

from lincorr_lightning.functional import forecast_from_direction, forecast_from_map, risk

N, N_SOURCE, N_TARGET = 60, 5, 4


def random_logits(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    answer = torch.randint(N_SOURCE, (N,), generator=generator)
    source, target, d_source, d_target = (normal(N, n) for n in (N_SOURCE, N_TARGET) * 2)
    return source, target, answer, d_source, d_target


def test_forecast_from_map_equals_the_definition() -> None:
    source, target, answer, _, _ = random_logits(0)
    weight = torch.randn(N_TARGET, N_SOURCE, dtype=torch.float64)
    bias = torch.randn(N_TARGET, dtype=torch.float64)
    ours = forecast_from_map(source, target, answer, weight)
    for i in range(N):
        taught = source[i].clone()
        taught[answer[i]] = max(source[i].tolist())
        # The prediction of W and b for the new source, minus that for the old one.
        change = (weight @ taught + bias) - (weight @ source[i] + bias)
        torch.testing.assert_close(ours[i], target[i] + change)


def test_an_answer_that_already_leads_changes_nothing() -> None:
    source, target, _, _, _ = random_logits(1)
    weight = torch.randn(N_TARGET, N_SOURCE, dtype=torch.float64)
    assert torch.equal(forecast_from_map(source, target, source.argmax(1), weight), target)
    still = forecast_from_direction(
        source, target, torch.ones_like(source), torch.ones_like(target), source.argmax(1)
    )
    assert torch.equal(still, target)


def test_forecast_from_direction_equals_the_definition() -> None:
    source, target, answer, d_source, d_target = random_logits(2)
    ours = forecast_from_direction(source, target, d_source, d_target, answer)
    moved = 0
    for i in range(N):
        a = int(answer[i])
        time = 0.0
        for j in range(N_SOURCE):
            behind, gain = source[i, j] - source[i, a], d_source[i, a] - d_source[i, j]
            if behind > 0 and gain > 0:
                time = max(time, float(behind / gain))
        moved += time > 0
        torch.testing.assert_close(ours[i], target[i] + time * d_target[i])
    assert moved > N // 3
    assert ours.isfinite().all()


def test_a_direction_that_raises_only_the_answer_makes_it_lead() -> None:
    source, _, answer, _, _ = random_logits(3)
    # With the source itself as target, the prediction is the source once the answer leads.
    d_source = torch.zeros_like(source).scatter_(1, answer[:, None], 0.25)
    then = forecast_from_direction(source, source, d_source, d_source, answer)
    torch.testing.assert_close(then.gather(1, answer[:, None])[:, 0], source.amax(1))
    # Raising one logit is what the map's forecast does with the identity as W.
    as_map = forecast_from_map(source, source, answer, torch.eye(N_SOURCE, dtype=torch.float64))
    torch.testing.assert_close(then, as_map)
    # How long the direction is does not matter.
    longer = forecast_from_direction(source, source, 70 * d_source, 70 * d_source, answer)
    torch.testing.assert_close(longer, then)


def test_risk_equals_the_definition() -> None:
    _, target, _, _, _ = random_logits(5)
    right = torch.rand(N, N_TARGET) < 0.4
    right[:, 0], right[:, 1] = True, False
    for i, value in enumerate(risk(target, right).tolist()):
        of = {kind: [float(t) for t, r in zip(target[i], right[i], strict=True) if r == kind]
              for kind in (True, False)}  # fmt: skip
        assert value == max(of[False]) - max(of[True])
        assert (value > 0) == (not right[i, target[i].argmax()])


def test_a_direction_that_does_not_raise_the_answer_predicts_no_change() -> None:
    source, target, answer, _, d_target = random_logits(4)
    away = torch.zeros_like(source).scatter_(1, answer[:, None], -1.0)
    assert torch.equal(forecast_from_direction(source, target, away, d_target, answer), target)
    even = torch.ones_like(source)
    assert torch.equal(forecast_from_direction(source, target, even, d_target, answer), target)
