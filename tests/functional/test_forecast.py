import torch

from lincorr_lightning.functional import forecast_from_map, risk

N, N_SOURCE, N_TARGET = 60, 5, 4


def random_logits(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    answer = torch.randint(N_SOURCE, (N,), generator=generator)
    return normal(N, N_SOURCE), normal(N, N_TARGET), answer


def test_forecast_from_map_equals_the_definition() -> None:
    source, target, answer = random_logits(0)
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
    source, target, _ = random_logits(1)
    weight = torch.randn(N_TARGET, N_SOURCE, dtype=torch.float64)
    assert torch.equal(forecast_from_map(source, target, source.argmax(1), weight), target)


def test_risk_equals_the_definition() -> None:
    _, target, _ = random_logits(5)
    right = torch.rand(N, N_TARGET) < 0.4
    right[:, 0], right[:, 1] = True, False
    for i, value in enumerate(risk(target, right).tolist()):
        of = {kind: [float(t) for t, r in zip(target[i], right[i], strict=True) if r == kind]
              for kind in (True, False)}  # fmt: skip
        assert value == max(of[False]) - max(of[True])
        assert (value > 0) == (not right[i, target[i].argmax()])
