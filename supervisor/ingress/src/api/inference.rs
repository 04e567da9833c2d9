//! Inferences, in the part that both protocols share.

use std::sync::Arc;

use bytes::Bytes;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{
    Metadata, RequestArrival, RequestFailure, RequestInput, RequestOptions, RequestOutput,
};
use shadowslice_datapath::router::Route;
use shadowslice_datapath::trace::Journal;
use shadowslice_shared::tensor::Datatype;

use super::frontend::Frontend;
use crate::admission::{BudgetShare, MemoryPermit, RequestError, run_blocking};
use crate::tensors::{
    InferRequest, NamedTensor, OutputFormat, OutputTensor, RegionSlice, check_format, check_inputs,
    requested_outputs,
};

/// The size of elements that are checked one by one, in bytes, that takes a millisecond.
const QUICK_BYTES: usize = 256 << 10;

/// The model of an inference.
pub(super) struct Target {
    pub(super) name: String,
    pub(super) route: Route,
    pub(super) metadata: Arc<Metadata>,
}

/// A request in the form that a pipeline accepts, and the outputs that its client wants.
pub(super) struct CheckedRequest {
    pub(super) inputs: Vec<RequestInput>,
    pub(super) options: RequestOptions,
    pub(super) outputs: OutputSelection,
}

impl Target {
    /// Returns the model at the end of a route, and records it in the journal. `id` is the client's
    /// name for the request, if it is known.
    pub(super) fn new(
        route: Route,
        name: String,
        id: Option<&str>,
        journal: Option<&Journal>,
    ) -> Result<Self, RequestError> {
        if let Some(journal) = journal {
            journal.set_model(&name);
            id.into_iter().for_each(|id| journal.set_id(id));
        }
        let metadata = route.pipeline().metadata_or_refuse(journal)?;
        Ok(Self { name, route, metadata })
    }

    /// Takes a place among the requests in flight.
    pub(super) fn admit(
        &self,
        permit: &MemoryPermit,
        journal: Option<&Journal>,
    ) -> Result<BudgetShare, RequestError> {
        let pipeline = self.route.pipeline();
        permit.client().admit().inspect_err(|_| pipeline.count_host_refusal(journal))
    }

    /// Counts a request that is malformed. The model does not receive it.
    pub(super) fn count_malformed<T>(&self, outcome: Result<T, RequestError>) -> Result<T, RequestError> {
        if let Err(RequestError::Failed(RequestFailure::Invalid(_))) = &outcome {
            self.route.pipeline().count_malformed();
        }
        outcome
    }

    /// Refuses a model that streams, for calls with a single answer.
    pub(super) fn refuse_streams(&self) -> Result<(), RequestError> {
        if self.metadata.streams.is_none() {
            return Ok(());
        }
        let name = &self.metadata.name;
        let why = format!("model '{name}' gives many answers to a request; use gRPC's ModelStreamInfer");
        Err(RequestError::Unsupported(why))
    }

    /// Checks a request and reads its inputs from shared memory. A malformed request counts. The
    /// request has an output format in HTTP, whose calls have a single answer.
    pub(super) async fn check(
        &self,
        front: &Frontend,
        mut request: InferRequest,
        format: Option<&OutputFormat>,
        peer: &Peer,
        permit: &MemoryPermit,
    ) -> Result<CheckedRequest, RequestError> {
        let checked = async {
            let order = requested_outputs(&self.metadata, &request.outputs)?;
            if let Some(format) = format {
                check_format(&self.metadata, &order, &request.outputs, format)?;
                self.refuse_streams()?;
            }
            let regions = request.outputs.iter().map(|output| output.region.as_ref());
            let regions = regions.map(|part| part.map(|part| front.regions.find(peer, part)).transpose());
            let regions = regions.collect::<Result<_, _>>()?;
            read_shared_inputs(front, peer, &mut request.inputs, permit)?;
            let inputs = check_tensors(&self.metadata, request.inputs).await?;
            let outputs = OutputSelection { order, regions };
            Ok(CheckedRequest { inputs, options: request.options, outputs })
        };
        self.count_malformed(checked.await)
    }

    /// Runs a request. `permit` receives the delivery of the outputs.
    pub(super) async fn infer(
        &self,
        CheckedRequest { inputs, options, outputs: selection }: CheckedRequest,
        arrival: RequestArrival,
        permit: &MemoryPermit,
    ) -> Result<Vec<OutputTensor>, RequestError> {
        let (outputs, delivery) = self.route.infer(inputs, options, arrival).await?.into_single();
        permit.add_deliveries(delivery.into());
        selection.select(&self.metadata, outputs)
    }
}

/// The outputs that a client wants, and their places.
pub(super) struct OutputSelection {
    /// The positions of the outputs among the model's outputs.
    order: Vec<usize>,
    /// The regions that receive the outputs, in the same order. The answer contains an output
    /// without a region.
    regions: Vec<Option<RegionSlice>>,
}

impl OutputSelection {
    /// Selects the outputs, and writes those with a region into shared memory.
    pub(super) fn select(
        &self,
        metadata: &Metadata,
        outputs: Vec<RequestOutput>,
    ) -> Result<Vec<OutputTensor>, RequestError> {
        if outputs.len() != metadata.outputs.len() {
            let (expected, got) = (metadata.outputs.len(), outputs.len());
            let why = format!("the model has {expected} outputs, but its answer has {got}");
            return Err(RequestFailure::Internal(why).into());
        }
        let mut outputs: Vec<_> = outputs.into_iter().map(Some).collect();
        let mut selected = Vec::new();
        for (position, &index) in self.order.iter().enumerate() {
            let (spec, output) = (&metadata.outputs[index], outputs[index].take());
            let Some(RequestOutput { shape, data }) = output else { continue };
            let region = self.regions.get(position).and_then(Option::as_ref);
            let data = match region {
                Some(region) => {
                    region.write(&spec.name, &data)?;
                    Bytes::new()
                }
                None => data,
            };
            let (name, is_shared) = (spec.name.clone(), region.is_some());
            selected.push(OutputTensor { name, datatype: spec.datatype, shape, data, is_shared });
        }
        Ok(selected)
    }
}

/// Returns the size in bytes of the outputs in an answer.
pub(super) fn tensor_bytes(outputs: &[OutputTensor]) -> usize {
    outputs.iter().map(|output| output.data.len()).sum()
}

async fn check_tensors(
    metadata: &Arc<Metadata>,
    tensors: Vec<NamedTensor>,
) -> Result<Vec<RequestInput>, RequestFailure> {
    let is_slow = |tensor: &&NamedTensor| matches!(tensor.datatype, Datatype::Bool | Datatype::Bytes);
    if tensors.iter().filter(is_slow).map(|tensor| tensor.data.len()).sum::<usize>() <= QUICK_BYTES {
        return check_inputs(metadata, tensors);
    }
    let metadata = Arc::clone(metadata);
    run_blocking("checking the tensors", move || check_inputs(&metadata, tensors)).await
}

/// Reads the inputs that are in shared memory. They have the same limit as if the client had sent
/// them, because a short request may name the same region many times.
fn read_shared_inputs(
    front: &Frontend,
    peer: &Peer,
    inputs: &mut [NamedTensor],
    permit: &MemoryPermit,
) -> Result<(), RequestError> {
    let mut left = front.request_bytes as u64;
    for input in inputs {
        let Some(region) = &input.region else { continue };
        left = left.checked_sub(region.byte_size).ok_or_else(|| {
            let limit = front.request_bytes;
            RequestError::TooLarge(format!(
                "the request names more than {limit} bytes (limits.request_bytes)"
            ))
        })?;
        input.data = front.regions.find(peer, region)?.read(permit)?.into();
    }
    Ok(())
}
