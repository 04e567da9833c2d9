//! `shadowslice cost`: what inferences of each model cost alone and together on a GPU.
//!
//! For each model, it searches the highest rate at which the model meets its SLO while no other model has
//! requests. Then it searches the highest common factor of these rates at which all models meet their SLOs at
//! the same time, once with every model on the whole GPU, and once under the policy `adaptive`.

mod host;
mod inputs;
mod load;
mod report;
mod search;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use shadowslice_config::{Config, load_here};
use shadowslice_policy::sharing::PolicyName;
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail, print_error};

use crate::serve::Failed;
use host::CostHost;
use load::LoadCounts;
use report::{CostReport, MixMeasurement, ModelCost, RateMeasurement};
use search::RateSearch;

/// The duration of the load before the measured time, relative to that time.
const SETTLE_FRACTION: f64 = 0.25;

/// The same part under `adaptive`, which first tries layouts.
const ADAPTIVE_SETTLE_FRACTION: f64 = 1.25;

/// The lateness of requests above which the load itself is too slow.
const MAX_LATE: Duration = Duration::from_millis(20);

/// The lowest rate that an option can give. Models get one request in a quarter of an hour.
const MIN_RATE: f64 = 0.001;

/// The highest rate that an option can give, which no model reaches.
const MAX_RATE: f64 = 1e6;

/// The name of the policy `static` with every model on the whole GPU.
const PLAIN_MPS: &str = "plain MPS";

/// The options of `shadowslice cost`.
#[derive(Debug, clap::Args)]
pub(crate) struct CostOptions {
    /// The configuration file.
    config: PathBuf,
    /// The price of one GPU for an hour, for example `2.50/h`.
    #[arg(long, value_name = "PRICE/h", value_parser = price)]
    price: f64,
    /// The rate of a model relative to other models, for example `bert=100`. You can repeat this option.
    /// [default: in proportion to the models' highest rates alone]
    #[arg(long = "rate", value_name = "MODEL=RATE", value_parser = rate)]
    rates: Vec<ModelRate>,
    /// The measured time of each rate. NVML reads the energy once a second.
    #[arg(long, value_name = "DURATION", default_value = "4s", value_parser = duration)]
    span: Duration,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct ModelRate {
    model: String,
    rate: f64,
}

fn price(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix("/h").unwrap_or(text).trim().parse();
    let price = number.ok().filter(|price: &f64| price.is_finite() && *price > 0.0);
    price.ok_or_else(|| format!("invalid price `{text}`; use for example 2.50/h"))
}

fn duration(text: &str) -> Result<Duration, String> {
    let parsed = shadowslice_config::duration(text)?;
    if parsed.is_zero() { Err("use at least 1ms".to_owned()) } else { Ok(parsed) }
}

fn rate(text: &str) -> Result<ModelRate, String> {
    let parsed = text.rsplit_once('=').and_then(|(model, rate)| Some((model, rate.parse().ok()?)));
    let (model, rate) =
        parsed.filter(|(_, rate): &(&str, f64)| (MIN_RATE..=MAX_RATE).contains(rate)).ok_or_else(|| {
            format!("invalid rate `{text}`; use for example bert=100, from {MIN_RATE} to {MAX_RATE}")
        })?;
    Ok(ModelRate { model: model.to_owned(), rate })
}

/// Runs the command and returns its exit code.
pub(crate) fn run(options: &CostOptions) -> u8 {
    match measure(options) {
        Ok(report) if options.json => match serde_json::to_string_pretty(&report) {
            Ok(json) => exit::print(&format!("{json}\n")),
            Err(error) => {
                fail(&format!("cannot write the report: {}", errors::chain(&error)), exit::SOFTWARE)
            }
        },
        Ok(report) => exit::print(&report.text()),
        Err(Failed { why, code }) => fail(&why, code),
    }
}

fn measure(options: &CostOptions) -> Result<CostReport, Failed> {
    let config = load_here(&options.config)
        .map_err(|error| Failed { why: errors::chain(&error), code: exit::CONFIG })?;
    let unknown =
        options.rates.iter().find(|rate| config.models.iter().all(|model| model.name != rate.model));
    if let Some(ModelRate { model, .. }) = unknown {
        let why = format!("--rate: the configuration has no model '{model}'");
        return Err(Failed { why, code: exit::USAGE });
    }
    let (span, settle) = (options.span, options.span.mul_f64(SETTLE_FRACTION));
    let given = options.rates.iter().map(|rate| (rate.model.clone(), rate.rate)).collect();
    let Measured { alone, idle_w, mix: plain } =
        host::with_models(&config, PolicyName::Static, async |host| {
            let idle_w = host.idle_power().await;
            let alone = alone(host, options).await?;
            let plan = MixPlan { policy: PLAIN_MPS, settle, span, full: &proportions(&alone, &given) };
            let mix = together(host, &plan, RateSearch::below(1.0)).await;
            Ok(Measured { alone, idle_w, mix })
        })?;
    let proportions = proportions(&alone, &given);
    let adaptive = host::with_models(&config, PolicyName::Adaptive, async |host| {
        let settle = span.mul_f64(ADAPTIVE_SETTLE_FRACTION);
        let plan = MixPlan { policy: "adaptive", settle, span, full: &proportions };
        // After rates that do not hold, the policy would need many seconds to leave its last layout.
        let search = plain.as_ref().map_or(RateSearch::below(1.0), |plain| RateSearch::from(plain.factor));
        Ok(together(host, &plan, search).await)
    })?;
    let gpus = used_gpus(&config);
    let mixes = plain.iter().chain(&adaptive);
    let together = mixes.map(|mix| report::together(mix, &alone, gpus, options.price)).collect();
    Ok(CostReport { price_per_gpu_hour: options.price, gpus, idle_w, alone, together })
}

struct Measured {
    alone: Vec<ModelCost>,
    idle_w: Option<f64>,
    mix: Option<MixMeasurement>,
}

fn used_gpus(config: &Config) -> usize {
    let mut gpus: Vec<usize> = config.models.iter().map(|model| model.gpu).collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus.len()
}

/// Returns the rate of each model at the factor 1: in proportion to the given rates, as high as all models
/// reach alone.
fn proportions(alone: &[ModelCost], given: &BTreeMap<String, f64>) -> Vec<f64> {
    if given.is_empty() {
        return alone.iter().map(|model| model.rate).collect();
    }
    let given = |model: &ModelCost| given.get(&model.model).copied().unwrap_or(model.rate);
    let factor = alone.iter().map(|model| model.rate / given(model)).fold(f64::INFINITY, f64::min);
    alone.iter().map(|model| given(model) * factor).collect()
}

/// Measures each model while the others have no requests.
async fn alone(host: &CostHost, options: &CostOptions) -> Result<Vec<ModelCost>, Failed> {
    let mut costs = Vec::new();
    for (index, name) in host.names().enumerate() {
        let mut search = RateSearch::below(host.target(index).capacity().await * 1.1);
        let mut best = None;
        while let Some(rate) = search.next() {
            let mut rates = vec![0.0; host.names().count()];
            rates[index] = rate;
            let run = host.run(&rates, options.span.mul_f64(SETTLE_FRACTION), options.span).await;
            let counts = &run.counts[index];
            let holds = host.target(index).holds(counts);
            progress(&format!("{name} alone at {rate:.0}/s"), [counts]);
            search.record(rate, holds);
            if holds {
                let (attainment, sm_seconds) = (counts.attainment(), run.sm_seconds[index]);
                let measured = RateMeasurement { model: name.to_owned(), rate, attainment, sm_seconds };
                best = Some(report::model_cost(&measured, options.price, run.power_of(host.gpu(index))));
            }
        }
        costs.push(best.ok_or_else(|| Failed {
            why: format!(
                "model '{name}' does not meet its SLO at any rate; raise its `slo`, or use a faster GPU"
            ),
            code: exit::REFUSED,
        })?);
    }
    Ok(costs)
}

/// The measurement of all models together.
struct MixPlan<'p> {
    policy: &'static str,
    settle: Duration,
    span: Duration,
    /// The rate of each model at the factor 1.
    full: &'p [f64],
}

/// Measures all models at the highest common factor of `full` rates. Returns `None` if no factor holds.
async fn together(host: &CostHost, plan: &MixPlan<'_>, mut search: RateSearch) -> Option<MixMeasurement> {
    let &MixPlan { policy, settle, span, full } = plan;
    let mut best = None;
    while let Some(factor) = search.next() {
        let rates: Vec<f64> = full.iter().map(|rate| rate * factor).collect();
        let run = host.run(&rates, settle, span).await;
        progress(&format!("{policy}, {:.0} % of the rates", factor * 100.0), &run.counts);
        // A model with a low rate may get no request in the measured time.
        let holds =
            |(index, counts): (usize, &LoadCounts)| counts.offered == 0 || host.target(index).holds(counts);
        let holds = run.counts.iter().enumerate().all(holds);
        search.record(factor, holds);
        if holds {
            let models = host.names().zip(&rates).zip(run.counts.iter().zip(&run.sm_seconds));
            let models = models.map(|((name, &rate), (counts, &sm_seconds))| RateMeasurement {
                model: name.to_owned(),
                rate,
                attainment: counts.attainment(),
                sm_seconds,
            });
            let (capacity_sm_s, power_w) = (host.capacity(run.measured), run.power());
            best = Some(MixMeasurement { policy, factor, models: models.collect(), capacity_sm_s, power_w });
        }
    }
    if best.is_none() {
        print_error(&format!("{policy}: the models meet their SLOs together at none of these rates"));
    }
    best
}

fn progress<'c>(what: &str, counts: impl IntoIterator<Item = &'c LoadCounts>) {
    let (mut attainments, mut late) = (Vec::new(), Duration::ZERO);
    for counts in counts {
        attainments.push(format!("{:.1} %", counts.attainment() * 100.0));
        late = late.max(counts.sent_late);
    }
    print_error(&format!("{what}: in time {}", attainments.join(", ")));
    if late > MAX_LATE {
        let late = late.as_millis();
        print_error(&format!("  requests were sent up to {late} ms late; the host's CPUs are too slow"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_and_rates_have_a_form() {
        assert_eq!([price("2.50/h"), price("3")], [Ok(2.5), Ok(3.0)]);
        for bad in ["", "/h", "-1/h", "0", "inf", "2.5/d"] {
            assert!(price(bad).unwrap_err().contains("2.50/h"), "{bad}");
        }
        assert_eq!(rate("a=b=5"), Ok(ModelRate { model: "a=b".to_owned(), rate: 5.0 }));
        for bad in ["a", "a=", "a=0", "a=nan"] {
            assert!(rate(bad).unwrap_err().contains("bert=100"), "{bad}");
        }
    }

    #[test]
    fn given_rates_are_scaled_until_one_model_reaches_its_highest_rate() {
        let model = |name: &str, rate| ModelCost {
            model: name.to_owned(),
            rate,
            attainment: 1.0,
            cost_per_million: None,
            joules_per_million: None,
        };
        let alone = [model("a", 1_000.0), model("b", 100.0)];
        assert_eq!(proportions(&alone, &BTreeMap::new()), [1_000.0, 100.0]);
        let given = [("a".to_owned(), 10.0), ("b".to_owned(), 5.0)].into();
        assert_eq!(proportions(&alone, &given), [200.0, 100.0]);
    }
}
