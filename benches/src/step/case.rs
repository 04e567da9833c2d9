//! What is run: a load that steps up, and what its model costs.

use std::fmt;
use std::time::Duration;

use shadowslice_tests::load::Arrivals;

/// All models' objective.
pub(super) const SLO: Duration = Duration::from_millis(40);

/// The SMs of each emulated GPU, which are percents as well.
pub(super) const SMS: u32 = 100;

/// A batch's fixed part, and where its time per row begins to be told by SMs. Both in ms and SMs.
const FIXED_MS: f64 = 2.0;
const LEAST_SMS: u32 = 10;

/// The largest batch that a model takes.
pub(super) const BATCH: u32 = 64;

/// A batch may execute for this part of the SLO, for this part of the time: so the policy counts what a share carries.
const BATCH_PART: f64 = 2.0 / 3.0;
const BUSY: f64 = 0.9;

/// A test of arrivals that errs once in so many seconds, a day, is what the policy has.
const ERRS_ONCE_IN_S: f64 = 86_400.0;

/// Whether a second worker may stand ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standby {
    Auto,
    Off,
}

/// A step in demand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Case {
    /// Requests a second before.
    pub(super) base: f64,
    /// And after.
    pub(super) step: f64,
    pub(super) arrivals: Arrivals,
    pub(super) standby: Standby,
    /// The time of a row on a whole GPU, in ms.
    pub(super) row_ms: f64,
}

/// A model of which two fifths of a GPU carry some 360 requests a second, and all of it some 900.
const COSTLY_MS: f64 = 0.925;

/// One that carries two and a half times as much.
const CHEAP_MS: f64 = 0.36;

const fn case(standby: Standby, row_ms: f64, base: f64, step: f64) -> Case {
    Case { base, step, arrivals: Arrivals::Poisson, standby, row_ms }
}

/// The same with arrivals at equal distances.
const fn evenly(case: Case) -> Case {
    Case { arrivals: Arrivals::Uniform, ..case }
}

/// All of them.
pub(super) const CASES: [Case; 12] = [
    case(Standby::Auto, COSTLY_MS, 30.0, 420.0),
    case(Standby::Auto, COSTLY_MS, 30.0, 720.0),
    case(Standby::Auto, COSTLY_MS, 30.0, 1080.0),
    case(Standby::Auto, COSTLY_MS, 150.0, 450.0),
    case(Standby::Auto, COSTLY_MS, 150.0, 660.0),
    evenly(case(Standby::Auto, COSTLY_MS, 150.0, 450.0)),
    evenly(case(Standby::Auto, COSTLY_MS, 150.0, 660.0)),
    case(Standby::Auto, CHEAP_MS, 370.0, 1200.0),
    case(Standby::Off, COSTLY_MS, 30.0, 420.0),
    case(Standby::Off, COSTLY_MS, 30.0, 720.0),
    case(Standby::Off, COSTLY_MS, 30.0, 1080.0),
    case(Standby::Off, CHEAP_MS, 370.0, 1200.0),
];

impl Case {
    /// Requests a second before and after.
    pub(super) fn rates(&self) -> String {
        let evenly = if self.arrivals == Arrivals::Uniform { "evenly " } else { "" };
        format!("{evenly}{} -> {}", self.base, self.step)
    }

    /// The requests a second that so many SMs carry within the SLO.
    pub(super) fn carried_by(&self, sms: u32) -> f64 {
        let longest = SLO.as_secs_f64() * 1e3 * BATCH_PART;
        let row = self.row_ms * f64::from(SMS) / f64::from(sms);
        let rows = ((longest - FIXED_MS) / row).floor().clamp(0.0, f64::from(BATCH));
        BUSY * rows / (FIXED_MS + rows * row) * 1e3
    }

    /// The milliseconds after the step that any test which errs as seldom takes on average to be sure of it, even if it knows both rates:
    /// the logarithm of the arrivals between two errors, over what independent ones say a second, their divergence (Lorden 1971).
    /// Nothing where arrivals are not independent.
    pub(super) fn least_ms(&self) -> Option<f64> {
        let Self { base, step, .. } = *self;
        let divergence = step * (step / base).ln() - (step - base);
        (self.arrivals == Arrivals::Poisson).then(|| (base * ERRS_ONCE_IN_S).ln() / divergence * 1e3)
    }

    /// Its profile: a fixed part, and a time per row in inverse proportion to the SMs. A worker starts in 1.6 s.
    pub(super) fn profile(&self) -> String {
        let columns: Vec<u32> = (LEAST_SMS..=SMS).step_by(2).collect();
        let times = |rows: u32| -> Vec<f64> {
            let time =
                |sms: &u32| FIXED_MS + f64::from(rows) * self.row_ms * f64::from(SMS) / f64::from(*sms);
            columns.iter().map(time).collect()
        };
        format!(
            "source: {{kind: illustrative}}\n\
             memory: {{context: 100Mi, weights: 10Mi, activations: 10Mi}}\n\
             start: {{process: 200ms, load: 1000ms, warm: 400ms}}\n\
             bandwidth: 0.1\n\
             execution_ms:\n  sms: {columns:?}\n  1: {:?}\n  {BATCH}: {:?}\n",
            times(1),
            times(BATCH)
        )
    }

    /// The configuration of so many such models, each on a GPU of its own.
    pub(super) fn config(&self, models: u32) -> String {
        let gpus = vec![format!("{{device: emulated, sms: {SMS}}}"); models as usize].join(", ");
        let models = (0..models).map(|number| {
            format!(
                "  - {{name: {}, gpu: {number}, engine: emulated, profile: profile.yaml, slo: {}ms, \
                 batch: {{max: {BATCH}}}, handover: shadow, standby: {}, \
                 tensors: [{{input: x, output: y, datatype: FP32, shape: [16]}}]}}\n",
                name(number),
                SLO.as_millis(),
                self.standby
            )
        });
        format!(
            "listen: {{http: [], grpc: [\"unix:grpc.sock\"], metrics: []}}\n\
             gpus: [{gpus}]\ncontroller: {{policy: adaptive}}\nmodels:\n{}",
            models.collect::<String>()
        )
    }
}

/// The name of the model on that GPU.
pub(super) fn name(number: u32) -> String {
    format!("m{number}")
}

impl fmt::Display for Standby {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Off => "off",
        })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s, standby {}", self.rates(), self.standby)
    }
}
