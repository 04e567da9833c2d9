//! The costs that follow from the measured rates.

use serde::Serialize;

/// The number of inferences to which costs and energies refer.
const MILLION: f64 = 1e6;

const SECONDS_PER_HOUR: f64 = 3600.0;

/// The report of `shadowslice cost`.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct CostReport {
    /// The price of one GPU for an hour.
    pub(super) price_per_gpu_hour: f64,
    /// The number of GPUs on which the models run together.
    pub(super) gpus: usize,
    /// The power of all idle GPUs in W, or `None` if it is unknown.
    pub(super) idle_w: Option<f64>,
    /// The models alone, each on a whole GPU.
    pub(super) alone: Vec<ModelCost>,
    /// The models together, by policy.
    pub(super) together: Vec<TogetherCost>,
}

/// The cost of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ModelCost {
    pub(super) model: String,
    /// The highest rate at which the SLO holds, in requests per second.
    pub(super) rate: f64,
    /// The fraction of requests in time at this rate.
    pub(super) attainment: f64,
    /// The cost of a million inferences, or `None` if the SLO never holds.
    pub(super) cost_per_million: Option<f64>,
    /// The energy of a million inferences in J, or `None` if it is unknown.
    pub(super) joules_per_million: Option<f64>,
}

/// The cost of all models on the same GPUs.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct TogetherCost {
    pub(super) policy: &'static str,
    /// The highest common factor of the models' rates at which all SLOs hold.
    pub(super) factor: f64,
    pub(super) models: Vec<ModelCost>,
    /// The idle part of the SM time.
    pub(super) idle: f64,
    /// The number of GPUs that the models need for the same rates if each has whole GPUs.
    pub(super) gpus_alone: f64,
    /// The part of the price of these GPUs that is saved. It is negative if running together costs more.
    pub(super) saving: f64,
}

/// A model's measurement at one rate.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RateMeasurement {
    pub(super) model: String,
    pub(super) rate: f64,
    pub(super) attainment: f64,
    /// The SM time in SM·s.
    pub(super) sm_seconds: f64,
}

/// The measurements of all models that run together.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MixMeasurement {
    pub(super) policy: &'static str,
    pub(super) factor: f64,
    pub(super) models: Vec<RateMeasurement>,
    /// The SMs of all GPUs, times the measured time, in SM·s.
    pub(super) capacity_sm_s: f64,
    /// The power of all GPUs in W, or `None` if it is unknown.
    pub(super) power_w: Option<f64>,
}

/// Returns the costs of models that share `gpus` GPUs. The price and the energy of the GPUs, with those of
/// idle SMs, are divided in proportion to the SM time.
pub(super) fn together(mix: &MixMeasurement, alone: &[ModelCost], gpus: usize, price: f64) -> TogetherCost {
    let used: f64 = mix.models.iter().map(|model| model.sm_seconds).sum();
    let cost = |model: &RateMeasurement| {
        let part = if used > 0.0 { model.sm_seconds / used } else { 0.0 };
        model_cost(model, price * gpus as f64 * part, mix.power_w.map(|power| power * part))
    };
    let gpus_alone: f64 = mix.models.iter().zip(alone).map(|(model, alone)| model.rate / alone.rate).sum();
    TogetherCost {
        policy: mix.policy,
        factor: mix.factor,
        models: mix.models.iter().map(cost).collect(),
        idle: (1.0 - used / mix.capacity_sm_s).max(0.0),
        gpus_alone,
        saving: 1.0 - gpus as f64 / gpus_alone,
    }
}

/// Returns the cost of a model that pays `price_per_hour` and uses `power_w`.
pub(super) fn model_cost(measured: &RateMeasurement, price_per_hour: f64, power_w: Option<f64>) -> ModelCost {
    let seconds = (measured.rate > 0.0).then(|| MILLION / measured.rate);
    ModelCost {
        model: measured.model.clone(),
        rate: measured.rate,
        attainment: measured.attainment,
        cost_per_million: seconds.map(|seconds| price_per_hour / SECONDS_PER_HOUR * seconds),
        joules_per_million: seconds.zip(power_w).map(|(seconds, power)| power * seconds),
    }
}

impl CostReport {
    /// Formats the report as tables.
    pub(super) fn text(&self) -> String {
        let mut text = format!("alone, each model on a whole GPU at {} an hour:\n", self.price_per_gpu_hour);
        text += &table(&self.alone);
        for together in &self.together {
            let TogetherCost { policy, factor, models, idle, gpus_alone, saving } = together;
            text += &format!(
                "\ntogether on {} GPUs, {policy}, at {:.0} % of these rates:\n",
                self.gpus,
                factor * 100.0
            );
            text += &table(models);
            text += &format!(
                "  alone, these rates need {gpus_alone:.2} GPUs: {:.0} % saved; {:.0} % of the SM time is idle\n",
                saving * 100.0,
                idle * 100.0
            );
        }
        if let Some(idle) = self.idle_w {
            text += &format!("\nidle GPUs: {idle:.0} W\n");
        }
        text
    }
}

fn table(models: &[ModelCost]) -> String {
    let widest = models.iter().map(|model| model.model.chars().count()).max().unwrap_or(0).max(5);
    let head = format!(
        "  {:widest$} {:>9} {:>9} {:>13} {:>13}\n",
        "MODEL", "RATE/S", "IN TIME", "COST/MILLION", "J/MILLION"
    );
    let row = |model: &ModelCost| {
        let ModelCost { model, rate, attainment, cost_per_million, joules_per_million } = model;
        let or_unknown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        let cost = or_unknown(cost_per_million.map(|cost| format!("{cost:.3}")));
        let joules = or_unknown(joules_per_million.map(|joules| format!("{joules:.0}")));
        format!("  {model:widest$} {rate:>9.0} {:>7.1} % {cost:>13} {joules:>13}\n", attainment * 100.0)
    };
    models.iter().fold(head, |table, model| table + &row(model))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(model: &str, rate: f64, sm_seconds: f64) -> RateMeasurement {
        RateMeasurement { model: model.to_owned(), rate, attainment: 0.995, sm_seconds }
    }

    fn report() -> CostReport {
        let alone: Vec<_> = [("a", 1_000.0), ("b", 200.0)]
            .map(|(name, rate)| model_cost(&measured(name, rate, 1.0), 3.6, Some(500.0)))
            .into();
        let mix = MixMeasurement {
            policy: "adaptive",
            factor: 0.7,
            models: vec![measured("a", 700.0, 300.0), measured("b", 140.0, 100.0)],
            capacity_sm_s: 500.0,
            power_w: Some(600.0),
        };
        let together = vec![together(&mix, &alone, 1, 3.6)];
        CostReport { price_per_gpu_hour: 3.6, gpus: 1, idle_w: Some(120.0), alone, together }
    }

    #[test]
    fn the_costs_add_up_to_the_price_of_the_gpus() {
        let CostReport { alone, together, .. } = report();
        // A GPU costs 0.001 a second, and a million inferences take 1,000 s.
        assert_eq!((alone[0].cost_per_million, alone[0].joules_per_million), (Some(1.0), Some(500_000.0)));
        let mix = &together[0];
        let per_second = |cost: fn(&ModelCost) -> Option<f64>| -> f64 {
            mix.models.iter().map(|model| cost(model).unwrap() * model.rate / 1e6).sum()
        };
        assert!((per_second(|model| model.cost_per_million) - 0.001).abs() < 1e-12);
        assert!((per_second(|model| model.joules_per_million) - 600.0).abs() < 1e-9);
        assert!((mix.gpus_alone - 1.4).abs() < 1e-12 && (mix.saving - (1.0 - 1.0 / 1.4)).abs() < 1e-12);
        assert!((mix.idle - 0.2).abs() < 1e-12);
    }

    #[test]
    fn equal_models_cost_the_same() {
        let alone: Vec<_> = ["a", "b"].map(|name| model_cost(&measured(name, 100.0, 9.0), 2.0, None)).into();
        let models = vec![measured("a", 80.0, 50.0), measured("b", 80.0, 50.0)];
        let mix =
            MixMeasurement { policy: "plain MPS", factor: 0.8, models, capacity_sm_s: 100.0, power_w: None };
        let TogetherCost { models, .. } = together(&mix, &alone, 1, 2.0);
        assert_eq!(models[0].cost_per_million, models[1].cost_per_million);
        assert_eq!(models[0].joules_per_million, None);
    }

    #[test]
    fn the_text_has_a_row_for_each_model_and_the_saving() {
        let text = report().text();
        for line in [
            "  a          1000    99.5 %         1.000        500000",
            "together on 1 GPUs, adaptive, at 70 % of these rates:",
            "  alone, these rates need 1.40 GPUs: 29 % saved; 20 % of the SM time is idle",
            "idle GPUs: 120 W",
        ] {
            assert!(text.contains(line), "{line:?} in\n{text}");
        }
    }
}
