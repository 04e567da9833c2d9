//! What a policy is told of a configured model.

use shadowslice_policy::sharing::Terms;
use shadowslice_shared::units::{Percent, Sms};

use super::types::{HandoverMode, Model};

impl Model {
    /// Its terms on a GPU on which shares come to so many SMs. A share that never changes has one bound.
    pub fn terms(&self, sms: impl Fn(Percent) -> Sms) -> Terms {
        let initial = sms(self.share.initial);
        let (min, max) = match self.handover {
            HandoverMode::Never => (initial, initial),
            _ => (sms(self.share.min), sms(self.share.max)),
        };
        Terms {
            name: self.name.clone(),
            gpu: self.gpu,
            initial,
            initial_given: self.share.given,
            min,
            max,
            slo: self.slo.latency,
            percentile: self.slo.percentile,
            priority: self.priority,
            max_batch: self.batch.resolve(true).0.max(1),
            profile: self.profile.clone(),
        }
    }

    /// The smallest share of this model that comes to `wanted` SMs or more, else the largest it may have.
    pub fn yielding(&self, wanted: Sms, sms: impl Fn(Percent) -> Sms) -> Percent {
        let may = self.share.min.get()..=self.share.max.get();
        let mut shares = may.filter_map(|percent| Percent::new(percent).ok());
        shares.find(|&share| sms(share) >= wanted).unwrap_or(self.share.max)
    }
}
