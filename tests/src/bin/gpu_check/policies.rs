//! How policies share the GPU: the same loads under each of them, scenario by scenario.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use serde_json::{Map, Value, json};
use shadowslice_tests::load::{Arrivals, Plan, Tally};
use shadowslice_tests::metrics::{self, Metrics};

use crate::error::Error;
use crate::figures::Figures;
use crate::models::Model;
use crate::numbers::rounded;
use crate::python;
use crate::serving::{Serving, gpu, threads};
use crate::stages::Stage;
use crate::tools::Setting;
use crate::traffic::Subject;

/// A policy as it is called in the figures, and how the configuration has it.
#[derive(Debug, Clone, Copy)]
struct Contestant {
    name: &'static str,
    policy: &'static str,
    handover: &'static str,
    /// Whether models share the GPU by MPS, or take turns as the driver has it.
    mps: bool,
}

const fn contestant(name: &'static str, policy: &'static str, handover: &'static str) -> Contestant {
    Contestant { name, policy, handover, mps: true }
}

/// With the shares that a scenario gives its models by hand.
const BY_HAND: Contestant = contestant("by hand+doors", "static+doors", "auto");

const CONTESTANTS: [Contestant; 7] = [
    contestant("unpartitioned", "unpartitioned", "auto"),
    contestant("adaptive", "adaptive", "auto"),
    contestant("adaptive, shadows", "adaptive", "shadow"),
    contestant("unpartitioned+doors", "unpartitioned+doors", "auto"),
    contestant("half+doors", "half+doors", "auto"),
    Contestant { mps: false, ..contestant("time slicing", "unpartitioned", "never") },
    contestant("unpartitioned, again", "unpartitioned", "auto"),
];

/// Rows of the largest batch.
const BATCH: u32 = 16;

/// Spans of a quick run are so many times shorter.
const QUICK: u64 = 4;

/// The clients of a model.
#[derive(Debug, Clone, Copy)]
enum Asked {
    /// So many clients, each of which asks again as soon as it is answered.
    InTurn(usize),
    /// So many requests a second in each span, at random times, answered or not.
    AtRandom(&'static [f64]),
}

/// A model and its clients.
#[derive(Debug, Clone, Copy)]
struct Guest {
    model: &'static str,
    slo_ms: u64,
    priority: u32,
    asked: Asked,
    /// Whether by a client in Python; else in Rust, which checks all answers.
    by_python: bool,
}

/// Models that are asked together.
#[derive(Debug, Clone, Copy)]
struct Scenario {
    name: &'static str,
    guests: &'static [Guest],
    /// The lengths of the parts in which it is measured, one after the other, in seconds.
    spans_s: &'static [u64],
    /// Shares in percent that fit onto the GPU together, if it is also measured with such.
    by_hand: &'static [u32],
}

const fn guest(model: &'static str, slo_ms: u64, priority: u32, asked: Asked) -> Guest {
    Guest { model, slo_ms, priority, asked, by_python: false }
}

const HOG: Guest = guest("vgg19", 100, 3, Asked::InTurn(24));

const BESIDE_HOG: Asked = Asked::AtRandom(&[300.0; 3]);

const SCENARIOS: [Scenario; 7] = [
    Scenario {
        name: "crowd",
        guests: &[
            guest("resnet50", 15, 1, Asked::InTurn(4)),
            guest("bert-base", 40, 2, Asked::InTurn(4)),
            guest("vgg19", 100, 3, Asked::InTurn(4)),
        ],
        spans_s: &[8; 3],
        by_hand: &[],
    },
    Scenario {
        name: "hog, 6 ms",
        guests: &[guest("resnet50", 6, 1, BESIDE_HOG), HOG],
        spans_s: &[10, 14, 12],
        by_hand: &[],
    },
    Scenario {
        name: "hog, 5 ms",
        guests: &[guest("resnet50", 5, 1, BESIDE_HOG), HOG],
        spans_s: &[10, 14, 12],
        by_hand: &[],
    },
    Scenario {
        name: "hog, seldom",
        guests: &[guest("resnet50", 5, 1, Asked::AtRandom(&[20.0; 3])), HOG],
        spans_s: &[10, 14, 12],
        by_hand: &[],
    },
    Scenario {
        name: "peers",
        guests: &[
            guest("bert-base", 8, 1, Asked::AtRandom(&[40.0; 3])),
            guest("resnet50", 15, 1, Asked::AtRandom(&[800.0; 3])),
            HOG,
        ],
        spans_s: &[10, 14, 12],
        by_hand: &[40, 20, 40],
    },
    Scenario {
        name: "step",
        guests: &[guest("resnet50", 15, 1, Asked::AtRandom(&[30.0, 800.0]))],
        spans_s: &[14, 6],
        by_hand: &[],
    },
    // As much as one worker carries, and half as much again. A part of it is refused; accepted
    // requests must be in time.
    Scenario {
        name: "flood",
        guests: &[guest("bert-base", 8, 1, Asked::AtRandom(&[3000.0, 6000.0, 9000.0]))],
        spans_s: &[8; 3],
        by_hand: &[],
    },
];

/// Five models at once. First, models of different sizes and priorities, of which twice and four
/// times as much is asked by and by. Second, models exported by PyTorch, of half precision and not,
/// all of which are asked for more and more, with SLOs that are easy to keep and SLOs that are not.
const MIXES: [Scenario; 5] = [
    Scenario { name: "exported", guests: &EXPORTED, spans_s: &[8; 4], by_hand: &[] },
    Scenario { name: "exported, others", guests: &OTHERS, spans_s: &[8; 4], by_hand: &[] },
    Scenario { name: "exported, tight", guests: &TIGHT, spans_s: &[8; 4], by_hand: &[] },
    Scenario { name: "tight mix", guests: &mix([6, 5, 15, 10, 30]), spans_s: &[10, 6, 8, 8], by_hand: &[] },
    Scenario { name: "mix", guests: &mix([15, 12, 40, 25, 100]), spans_s: &[10, 6, 8, 8], by_hand: &[] },
];

const EXPORTED: [Guest; 5] = [
    Guest { by_python: true, ..guest("vit-fp16", 15, 1, Asked::AtRandom(&[100.0, 200.0, 400.0, 600.0])) },
    guest("bert-bf16", 20, 1, Asked::AtRandom(&[100.0, 200.0, 400.0, 800.0])),
    Guest { by_python: true, ..guest("resnet-fp16", 25, 2, Asked::AtRandom(&[100.0, 200.0, 400.0, 600.0])) },
    guest("resnet-fp32", 40, 2, Asked::AtRandom(&[100.0, 200.0, 400.0, 800.0])),
    guest("convnext-bf16", 60, 3, Asked::AtRandom(&[60.0, 120.0, 240.0, 480.0])),
];

const TIGHT: [Guest; 5] = [
    Guest { by_python: true, ..guest("vit-fp16", 8, 1, Asked::AtRandom(&[300.0, 500.0, 500.0, 300.0])) },
    guest("bert-bf16", 4, 1, Asked::AtRandom(&[500.0, 1000.0, 1000.0, 500.0])),
    Guest { by_python: true, ..guest("resnet-fp16", 10, 2, Asked::AtRandom(&[300.0, 500.0, 500.0, 300.0])) },
    guest("resnet-fp32", 20, 2, Asked::AtRandom(&[500.0, 1000.0, 2000.0, 500.0])),
    guest("convnext-bf16", 60, 3, Asked::AtRandom(&[500.0, 1000.0, 2000.0, 500.0])),
];

const OTHERS: [Guest; 5] = [
    Guest { by_python: true, ..guest("gpt2-fp16", 10, 1, Asked::AtRandom(&[200.0, 400.0, 500.0, 200.0])) },
    guest("efficientnet-fp32", 15, 1, Asked::AtRandom(&[200.0, 400.0, 1000.0, 200.0])),
    guest("distilbert-fp16", 8, 2, Asked::AtRandom(&[300.0, 600.0, 1500.0, 300.0])),
    Guest {
        by_python: true,
        ..guest("densenet-fp32", 40, 2, Asked::AtRandom(&[100.0, 200.0, 400.0, 100.0]))
    },
    guest("regnet-fp16", 60, 3, Asked::AtRandom(&[200.0, 400.0, 1500.0, 200.0])),
];

/// With these SLOs in ms.
const fn mix([resnet50, mobilenet, bert, alexnet, vgg19]: [u64; 5]) -> [Guest; 5] {
    [
        guest("resnet50", resnet50, 1, Asked::AtRandom(&[500.0, 500.0, 1200.0, 500.0])),
        guest("mobilenet-v2", mobilenet, 1, Asked::AtRandom(&[300.0; 4])),
        guest("bert-base", bert, 2, Asked::AtRandom(&[600.0, 600.0, 600.0, 2400.0])),
        guest("alexnet", alexnet, 2, Asked::AtRandom(&[300.0; 4])),
        guest("vgg19", vgg19, 3, Asked::AtRandom(&[500.0; 4])),
    ]
}

/// The names of all scenarios.
pub(crate) fn scenarios() -> impl Iterator<Item = &'static str> {
    SCENARIOS.iter().chain(&MIXES).map(|scenario| scenario.name)
}

/// The names of all policies in the figures.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    CONTESTANTS.iter().chain([&BY_HAND]).map(|contestant| contestant.name)
}

/// The suffix of a policy's name from the second round on.
pub(crate) const ROUND: &str = ", round ";

/// These policies in turn, and back in every other round, each with its name in the figures.
fn rounds(contestants: &[Contestant], rounds: u32) -> Vec<(String, Contestant)> {
    let round = |round: u32| {
        let mut contestants = contestants.to_vec();
        if round % 2 == 1 {
            contestants.reverse();
        }
        let named = move |contestant: Contestant| match round {
            0 => (contestant.name.to_owned(), contestant),
            _ => (format!("{}{ROUND}{}", contestant.name, round + 1), contestant),
        };
        contestants.into_iter().map(named)
    };
    (0..rounds).flat_map(round).collect()
}

/// One model, or two or three.
pub(crate) async fn run(setting: &Setting, figures: &mut Figures) -> Result<(), Error> {
    run_all(Stage::Policies, &SCENARIOS, setting, figures).await
}

/// Five models at once.
pub(crate) async fn run_mixes(setting: &Setting, figures: &mut Figures) -> Result<(), Error> {
    run_all(Stage::Mixes, &MIXES, setting, figures).await
}

async fn run_all(
    stage: Stage,
    scenarios: &[Scenario],
    setting: &Setting,
    figures: &mut Figures,
) -> Result<(), Error> {
    let is_meant = |scenario: &&Scenario| {
        setting.scenarios.is_empty() || setting.scenarios.iter().any(|name| name == scenario.name)
    };
    for scenario in scenarios.iter().filter(is_meant) {
        let Some(models) = scenario.models(setting) else {
            println!("{}: {} is left out: its models are not all there", stage.name(), scenario.name);
            continue;
        };
        let by_hand = (!scenario.by_hand.is_empty()).then_some(&BY_HAND);
        let is_meant = |of: &Contestant| {
            setting.policies.is_empty() || setting.policies.iter().any(|name| name == of.name)
        };
        let contestants: Vec<Contestant> =
            CONTESTANTS.iter().chain(by_hand).copied().filter(is_meant).collect();
        for (name, contestant) in rounds(&contestants, setting.rounds) {
            let done = format!("{}, {name}", scenario.name);
            if figures.has_model(stage, &done, setting.quick) {
                continue;
            }
            let config = scenario.config(setting, figures, contestant, &models)?;
            let log = format!("{}-{done}", stage.name()).replace(", ", "-").replace(' ', "-");
            let serving = Serving::start_with(setting, &log, &config).await?;
            let spans = scenario.spans(setting, &serving).await?;
            figures.set(&[stage.name(), scenario.name, &name], spans);
            serving.stop(figures).await?;
            figures.has_now(stage, &done, setting.quick)?;
        }
    }
    Ok(())
}

impl Scenario {
    /// The files of its models, if all are there.
    fn models<'a>(&self, setting: &'a Setting) -> Option<Vec<&'a Model>> {
        let all = setting.models.iter().chain(&setting.halves);
        let file = |guest: &Guest| all.clone().find(|model| model.name == guest.model);
        self.guests.iter().map(file).collect()
    }

    fn config(
        &self,
        setting: &Setting,
        figures: &Figures,
        contestant: Contestant,
        models: &[&Model],
    ) -> Result<String, Error> {
        let Contestant { policy, handover, mps, .. } = contestant;
        let gpu = if mps { gpu(setting) } else { gpu(setting).replace('}', ", partition: none}") };
        let mut text = format!(
            "listen: {{http: [\"unix:http.sock\"], grpc: [\"unix:grpc.sock\"], metrics: [\"unix:metrics.sock\"]}}\ngpus: [{gpu}]\n\
             controller: {{policy: {policy}}}\ntimeouts: {{spawn: 30s, warm: 3m}}\nmodels:\n"
        );
        for (place, (Guest { model: name, slo_ms, priority, .. }, model)) in
            self.guests.iter().zip(models).enumerate()
        {
            let path = model.path.to_string_lossy();
            write!(
                text,
                "  - {{name: {name}, path: {path:?}, slo: {slo_ms}ms, priority: {priority}, batch: {{max: {BATCH}}}, handover: {handover}, \
                 queue: {{memory: 1Gi}}, threads: {}",
                threads()
            )
            .expect("a string takes everything");
            if let Some(profile) = figures.get(&["profiles", name]).and_then(Value::as_str) {
                let path = setting.out.join("profiles").join(format!("{name}.yaml"));
                std::fs::write(&path, profile).map_err(Error::io("write", &path))?;
                write!(text, ", profile: {:?}", path.to_string_lossy()).expect("a string takes everything");
            }
            if policy == BY_HAND.policy {
                write!(text, ", share: {{initial: {}%}}", self.by_hand[place])
                    .expect("a string takes everything");
            }
            text.push_str("}\n");
        }
        Ok(text)
    }

    async fn spans(&self, setting: &Setting, serving: &Serving) -> Result<Value, Error> {
        let learning = self.guests.iter().map(|guest| Subject::learn(&serving.server, guest.model));
        let subjects: Vec<Arc<Subject>> = try_join_all(learning).await?;
        let mut spans = Vec::new();
        let mut counted = self.counted(serving).await?;
        for (part, &seconds) in self.spans_s.iter().enumerate() {
            let span = Duration::from_millis(seconds * 1000 / if setting.quick { QUICK } else { 1 });
            // Models that are asked as often are not asked at the same moments.
            let seed = |place: usize| (part * self.guests.len() + place) as u64 + 1;
            let asking = self.guests.iter().zip(&subjects).enumerate();
            let asking =
                asking.map(|(place, (guest, subject))| guest.ask(serving, subject, part, seed(place), span));
            let tallies: Vec<Tally> = try_join_all(asking).await?;
            let before = std::mem::replace(&mut counted, self.counted(serving).await?);
            let mut models = Map::new();
            for (index, (guest, tally)) in self.guests.iter().zip(&tallies).enumerate() {
                if tally.wrong > 0 {
                    let why = format!("{} wrong answers: {:?}", tally.wrong, tally.examples);
                    return Err(Error::Request { model: guest.model.into(), why });
                }
                let share = serving.server.model(guest.model).await?.share_percent;
                let counted = counted[index].since(before[index]);
                models.insert(guest.model.into(), guest.figures(tally, span, counted, share));
            }
            spans.push(json!({ "seconds": rounded(span.as_secs_f64()), "models": models }));
        }
        Ok(spans.into())
    }

    /// The supervisor's counts for each model.
    async fn counted(&self, serving: &Serving) -> Result<Vec<Counted>, Error> {
        let socket = serving.server.home().run_dir().join("metrics.sock");
        let failed = |source| Error::Io { what: "ask for the metrics".into(), source };
        let answer = metrics::ask(&socket, "GET", "/metrics").await.map_err(failed)?;
        let metrics = Metrics::parse(&answer.body).map_err(Error::Unusable)?;
        let of = |guest: &Guest, name: &str| {
            let missing = || Error::Unusable(format!("there is no metric {name}"));
            metrics.of(guest.model, name, "").ok_or_else(missing)
        };
        let counted = |guest: &Guest| {
            Ok(Counted {
                within_slo: of(guest, "requests_within_slo_total")?,
                came: of(guest, "request_receive_seconds_count")?,
                coming_s: of(guest, "request_receive_seconds_sum")?,
            })
        };
        self.guests.iter().map(counted).collect()
    }
}

/// The supervisor's counts for one model.
#[derive(Debug, Clone, Copy)]
struct Counted {
    /// Requests answered within the SLO.
    within_slo: f64,
    /// Requests that came, and how long that took altogether.
    came: f64,
    coming_s: f64,
}

impl Counted {
    fn since(self, before: Self) -> Self {
        Self {
            within_slo: self.within_slo - before.within_slo,
            came: self.came - before.came,
            coming_s: self.coming_s - before.coming_s,
        }
    }
}

impl Guest {
    /// Asks for so long, in that part of the scenario; at random by that seed.
    async fn ask(
        &self,
        serving: &Serving,
        subject: &Arc<Subject>,
        part: usize,
        seed: u64,
        span: Duration,
    ) -> Result<Tally, Error> {
        match self.asked {
            Asked::InTurn(clients) => Ok(subject.ask_in_turn(clients, span).await),
            Asked::AtRandom(rates) => {
                let plan = Plan { rate: rates[part], span, arrivals: Arrivals::Poisson, seed };
                if self.by_python {
                    let socket = serving.server.home().run_dir().join("http.sock");
                    return python::ask_at_random(&socket, self.model, &plan).await;
                }
                Ok(subject.ask_at_random(&plan).await)
            }
        }
    }

    /// The outcome of its requests, as clients see it and as the supervisor counted it. Counts are
    /// divided by the time in which the requests were sent: a late last answer must not lower the
    /// rate.
    fn figures(&self, tally: &Tally, span: Duration, counted: Counted, share: u32) -> Value {
        let ms = |quantile| rounded(tally.latency_ms(quantile));
        json!({
            "offered": tally.offered,
            "answered_per_s": rounded(tally.right as f64 / span.as_secs_f64()),
            "p50_ms": ms(0.5), "p90_ms": ms(0.9), "p99_ms": ms(0.99),
            "within_slo": rounded(tally.attainment(Duration::from_millis(self.slo_ms))),
            "counted_within_slo": rounded(counted.within_slo / tally.offered.max(1) as f64),
            "receive_ms": rounded(counted.coming_s / counted.came.max(1.0) * 1e3),
            "failed": tally.failed,
            "share_percent": share,
            "sent_late_ms": rounded(tally.sent_late.as_secs_f64() * 1e3),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_other_round_goes_back() {
        let names = |count: u32| -> Vec<String> {
            let contestants = [contestant("a", "x", "auto"), contestant("b", "y", "auto")];
            rounds(&contestants, count).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(1), ["a", "b"]);
        assert_eq!(names(3), ["a", "b", "b, round 2", "a, round 2", "a, round 3", "b, round 3"]);
    }
}
