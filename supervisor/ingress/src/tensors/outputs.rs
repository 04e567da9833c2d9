//! The outputs that a client wants, and the form in which it receives each.

use bytes::Bytes;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{Metadata, RequestFailure, RequestOutput};
use shadowslice_shared::tensor::Datatype;

use super::check::{self, InferRequest};
use super::shared_memory::{RegionSlice, SharedMemory, SharedTensor};
use super::values;
use crate::admission::{RequestError, invalid};

/// The form of an output. `R` is the place of an output in shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OutputForm<R> {
    /// The JSON of the answer contains the values.
    Json,
    /// The answer contains the bytes.
    Binary,
    /// The answer contains no elements, because they are in shared memory.
    Shared(R),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestedOutput {
    pub(crate) name: String,
    pub(crate) form: OutputForm<SharedTensor>,
}

/// The outputs of an answer, in their order.
pub(crate) struct OutputSelection(Vec<SelectedOutput>);

struct SelectedOutput {
    /// The position among the model's outputs.
    index: usize,
    form: OutputForm<RegionSlice>,
}

/// An output of an answer, in the form that the client receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputTensor {
    pub(crate) name: String,
    pub(crate) datatype: Datatype,
    pub(crate) shape: Vec<i64>,
    /// The elements, as in [`RequestOutput::data`]. They are empty if they are in shared memory.
    pub(crate) data: Bytes,
    pub(crate) form: OutputForm<()>,
}

impl OutputSelection {
    /// Returns the outputs that a request wants. If it names none, it wants all. Refuses outputs
    /// that cannot be written in the requested form, before the model runs.
    pub(crate) fn new(
        model: &Metadata,
        request: &InferRequest,
        regions: &SharedMemory,
        peer: &Peer,
    ) -> Result<Self, RequestError> {
        let mut selected: Vec<SelectedOutput> = Vec::new();
        for RequestedOutput { name, form } in &request.outputs {
            let Some(index) = model.outputs.iter().position(|spec| spec.name == *name) else {
                return Err(check::unexpected("output", name, model, model.outputs.iter()).into());
            };
            if selected.iter().any(|other| other.index == index) {
                return invalid(format!("output '{name}' is requested twice of model '{}'", model.name));
            }
            let form = match form {
                OutputForm::Json => OutputForm::Json,
                OutputForm::Binary => OutputForm::Binary,
                OutputForm::Shared(part) => OutputForm::Shared(regions.find(peer, part)?),
            };
            selected.push(SelectedOutput { index, form });
        }
        if selected.is_empty() {
            let form = || if request.is_binary { OutputForm::Binary } else { OutputForm::Json };
            selected.extend((0..model.outputs.len()).map(|index| SelectedOutput { index, form: form() }));
        }
        for output in selected.iter().filter(|output| matches!(output.form, OutputForm::Json)) {
            let spec = &model.outputs[output.index];
            values::no_json_form(spec.datatype)
                .map_err(|why| RequestFailure::Invalid(format!("output '{}': {why}", spec.name)))?;
        }
        Ok(Self(selected))
    }

    /// Selects the outputs, and writes those with a region into shared memory.
    pub(crate) fn select(
        &self,
        model: &Metadata,
        outputs: Vec<RequestOutput>,
    ) -> Result<Vec<OutputTensor>, RequestError> {
        if outputs.len() != model.outputs.len() {
            let (expected, got) = (model.outputs.len(), outputs.len());
            let why = format!("the model has {expected} outputs, but its answer has {got}");
            return Err(RequestFailure::Internal(why).into());
        }
        let mut outputs: Vec<_> = outputs.into_iter().map(Some).collect();
        let mut selected = Vec::with_capacity(self.0.len());
        for SelectedOutput { index, form } in &self.0 {
            let (spec, output) = (&model.outputs[*index], outputs[*index].take());
            let Some(RequestOutput { shape, data }) = output else { continue };
            let (form, data) = match form {
                OutputForm::Json => (OutputForm::Json, data),
                OutputForm::Binary => (OutputForm::Binary, data),
                OutputForm::Shared(region) => {
                    region.write(&spec.name, &data)?;
                    (OutputForm::Shared(()), Bytes::new())
                }
            };
            selected.push(OutputTensor {
                name: spec.name.clone(),
                datatype: spec.datatype,
                shape,
                data,
                form,
            });
        }
        Ok(selected)
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_datapath::peer::Guard;
    use shadowslice_datapath::pipeline::RequestOptions;
    use shadowslice_shared::tensor::TensorSpec;

    use super::*;

    const CLIENT: Peer = Peer::Unix { uid: 0, groups: Vec::new(), pid: 1 };

    fn select(names: &[&str], is_binary: bool) -> Result<Vec<usize>, RequestError> {
        let spec = |name: &str, datatype| TensorSpec { name: name.into(), datatype, shape: vec![1] };
        let model = Metadata {
            name: "m".into(),
            version: "1".into(),
            platform: "emulated",
            max_batch: 0,
            streams: None,
            inputs: Vec::new(),
            optional: Vec::new(),
            outputs: vec![spec("y", Datatype::Fp32), spec("z", Datatype::Fp16)],
        };
        let form = || if is_binary { OutputForm::Binary } else { OutputForm::Json };
        let outputs = names.iter().map(|name| RequestedOutput { name: name.to_string(), form: form() });
        let request = InferRequest {
            id: String::new(),
            inputs: Vec::new(),
            outputs: outputs.collect(),
            is_binary,
            options: RequestOptions::default(),
        };
        let selection = OutputSelection::new(&model, &request, &SharedMemory::new(Guard::nobody()), &CLIENT)?;
        Ok(selection.0.iter().map(|output| output.index).collect())
    }

    #[test]
    fn outputs_are_chosen_in_the_order_of_the_request() {
        assert_eq!(select(&[], true), Ok(vec![0, 1]));
        assert_eq!(select(&["z", "y"], true), Ok(vec![1, 0]));
        assert_eq!(select(&["z"], true), Ok(vec![1]));
        for wrong in [&["q"][..], &["y", "y"], &["y", ""]] {
            assert!(
                matches!(select(wrong, true), Err(RequestError::Failed(RequestFailure::Invalid(_)))),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn half_precision_as_json_is_refused_before_the_model_runs() {
        assert_eq!(select(&["y"], false), Ok(vec![0]));
        for half in [&["z"][..], &[]] {
            assert!(matches!(select(half, false), Err(RequestError::Failed(RequestFailure::Invalid(_)))));
        }
    }
}
