//! The terms that a policy gets of a configured model.

use shadowslice_policy::sharing::ModelSpec;
use shadowslice_shared::units::{Percent, Sms};

use super::types::{HandoverMode, Model};

impl Model {
    /// `sms` says to how many SMs a share comes. A model whose share never changes has no other
    /// share.
    pub fn terms(&self, sms: impl Fn(Percent) -> Sms) -> ModelSpec {
        let initial = sms(self.share.initial);
        let mut shares: Vec<Sms> = match self.handover {
            HandoverMode::Never => vec![initial],
            _ => self.shares().map(sms).collect(),
        };
        shares.dedup();
        ModelSpec {
            name: self.name.clone(),
            gpu: self.gpu,
            initial,
            initial_given: self.share.given,
            shares,
            slo: self.slo.latency,
            percentile: self.slo.percentile,
            priority: self.priority,
            max_batch: self.batch.resolve(true).0.max(1),
            profile: self.profile.clone(),
        }
    }

    /// The smallest share that comes to `wanted` SMs or more, else the largest that the model may
    /// have.
    pub fn yielding(&self, wanted: Sms, sms: impl Fn(Percent) -> Sms) -> Percent {
        self.shares().find(|&share| sms(share) >= wanted).unwrap_or(self.share.max)
    }

    fn shares(&self) -> impl Iterator<Item = Percent> {
        let may = self.share.min.get()..=self.share.max.get();
        may.filter_map(|percent| Percent::new(percent).ok())
    }
}
