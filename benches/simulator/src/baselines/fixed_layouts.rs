//! A policy that keeps one of the adaptive policy's layouts on each GPU. Evaluations use it as a
//! reference for the adaptive policy's choice of layout.

use shadowslice_policy::sharing::{
    AdmissionPolicy, Layout, LayoutShare, LayoutTenant, ModelSpec, Pattern, PolicyInput, ShareTarget,
    VerdictReason, candidates,
};
use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::units::Sms;

/// The layout of each GPU.
#[derive(Debug, Clone)]
pub(super) struct FixedLayouts {
    layouts: Vec<Layout>,
    shapes: Vec<SharedGpu>,
}

impl FixedLayouts {
    /// Returns a policy with the layouts of a pattern. If the pattern does not apply to the models of a
    /// GPU, these models keep their initial shares.
    ///
    /// `work` is the fraction of its GPU that each model's requests need, 0 to 1.
    pub(super) fn new(pattern: Pattern, shapes: &[SharedGpu], specs: &[ModelSpec], work: &[f64]) -> Self {
        let of = |gpu: usize| {
            let mut all = family(gpu, specs, work).into_iter();
            all.find(|layout| layout.pattern == pattern).unwrap_or(Layout::AT_REST)
        };
        Self { layouts: (0..shapes.len()).map(of).collect(), shapes: shapes.to_vec() }
    }

    /// Returns the patterns that apply to the models of at least one GPU.
    pub(super) fn patterns(gpus: usize, specs: &[ModelSpec], work: &[f64]) -> Vec<Pattern> {
        let mut found = Vec::new();
        for layout in (0..gpus).flat_map(|gpu| family(gpu, specs, work)) {
            if !found.contains(&layout.pattern) {
                found.push(layout.pattern);
            }
        }
        found
    }

    pub(super) fn shares(&self, specs: &[ModelSpec]) -> Vec<Sms> {
        (0..specs.len()).map(|model| self.placement(model, specs, true).sms).collect()
    }

    pub(super) fn decide(&self, specs: &[ModelSpec], input: &PolicyInput) -> Vec<ShareTarget> {
        let target = |model: usize| {
            let inside = input.models[model].groups.is_some();
            let LayoutShare { sms, groups } = self.placement(model, specs, inside);
            ShareTarget {
                sms,
                groups,
                admission: AdmissionPolicy::accept_all(specs[model].max_batch),
                why: VerdictReason::PolicyShare,
            }
        };
        (0..specs.len()).map(target).collect()
    }

    fn placement(&self, model: usize, specs: &[ModelSpec], inside: bool) -> LayoutShare {
        let gpu = specs[model].gpu;
        self.layouts[gpu].placement(model, &specs[model], &self.shapes[gpu], inside)
    }
}

/// Returns all layouts that may reduce the misses of a model with the highest priority on this GPU.
fn family(gpu: usize, specs: &[ModelSpec], work: &[f64]) -> Vec<Layout> {
    let tenant = |model: usize| LayoutTenant { model, priority: specs[model].priority, work: work[model] };
    let tenants: Vec<LayoutTenant> =
        (0..specs.len()).filter(|&model| specs[model].gpu == gpu).map(tenant).collect();
    let first = tenants.iter().min_by_key(|tenant| tenant.priority);
    candidates(&tenants, &tenants, first.copied())
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::groups::{GpuPart, Groups};
    use shadowslice_shared::units::Timestamp;

    use super::super::fixtures::{snapshot, spec};
    use super::*;
    use shadowslice_policy::sharing::ModelSnapshot;

    const SMS: Sms = Sms(132);

    /// Returns four models. Three models are on the first GPU, and one of these three has the highest
    /// priority. The fourth model is on the second GPU.
    fn models() -> Vec<ModelSpec> {
        let model = |(gpu, priority)| ModelSpec { gpu, priority, ..spec("model", 10) };
        [(0, 1), (0, 2), (0, 2), (1, 1)].map(model).to_vec()
    }

    fn gpus() -> Vec<SharedGpu> {
        vec![SharedGpu::new(SMS); 2]
    }

    fn decided(pattern: Pattern, groups: Option<Groups>) -> Vec<ShareTarget> {
        let models = models();
        let policy = FixedLayouts::new(pattern, &gpus(), &models, &[0.3; 4]);
        let model = |_: &ModelSpec| ModelSnapshot { groups, ..snapshot(SMS) };
        let input = PolicyInput {
            now: Timestamp::default(),
            gpus: vec![SMS; 2],
            models: models.iter().map(model).collect(),
        };
        policy.decide(&models, &input)
    }

    #[test]
    fn each_model_keeps_its_part_and_a_gpu_without_need_stays_at_rest() {
        let division = SharedGpu::new(SMS).division.unwrap();
        let half = |piece| Some(division.groups_in(GpuPart::new(piece, 1, 2)));
        let inside: Vec<_> = decided(Pattern::LowerHalves, Some(Groups::WHOLE));
        let groups: Vec<_> = inside.iter().map(|target| target.groups).collect();
        assert_eq!(groups, [None, half(0), half(1), None]);
        let by_shadows = decided(Pattern::LowerHalves, None);
        let sms: Vec<u32> = by_shadows.iter().map(|target| target.sms.0).collect();
        assert_eq!(sms, [132, 66, 66, 132]);
        assert!(by_shadows.iter().all(|target| target.groups.is_none()));
    }

    #[test]
    fn only_layouts_that_apply_to_a_gpu_are_listed_once_each() {
        let found = |work: &[f64]| FixedLayouts::patterns(2, &models(), work);
        let all = found(&[0.3; 4]);
        assert!(all.contains(&Pattern::LowerHalves) && all.contains(&Pattern::Halves));
        assert!(!all.contains(&Pattern::Thirds) && !all.contains(&Pattern::AtRest), "{all:?}");
        assert!(all.iter().all(|pattern| all.iter().filter(|other| *other == pattern).count() == 1));
        assert_eq!(found(&[0.3, 0.0, 0.0, 0.3]), [], "models without work need no layout");
    }
}
