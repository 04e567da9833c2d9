//! A model as a request finds it.

use std::sync::Arc;

use bytes::Bytes;
use shadowslice_shared::tensor::Datatype;

use crate::Frontend;
use crate::admission::memory_permit::Reserved;
use crate::admission::request_error::{RequestError, away};
use crate::tensors::check::{self, Clipped, InferRequest, NamedTensor};
use crate::tensors::shared_memory::Found;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{
    Metadata, RequestArrival, RequestFailure, RequestInput, RequestOptions, RequestOutput,
};
use shadowslice_datapath::router::{Route, Router};

pub(crate) const VERSION: &str = "1";

/// Elements that are looked at one by one, in bytes, within a millisecond.
const QUICK_BYTES: usize = 256 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answered {
    pub(crate) name: String,
    pub(crate) datatype: Datatype,
    pub(crate) shape: Vec<i64>,
    /// Its elements, as in [`shadowslice_datapath::pipeline::RequestOutput::data`].
    pub(crate) data: Bytes,
    /// Whether it was put into shared memory instead.
    pub(crate) placed: bool,
}

/// An empty version means the only version.
pub(crate) fn find(router: &Router, name: &str, version: &str) -> Result<Route, RequestError> {
    let pipeline = router.model(name).ok_or_else(|| {
        RequestError::NotFound(format!("Request for unknown model: '{}' is not found", Clipped(name)))
    })?;
    if version.is_empty() || version == VERSION {
        Ok(pipeline)
    } else {
        Err(RequestError::NotFound(format!(
            "Request for unknown model: '{}' version {} is not found; its version is {VERSION}",
            Clipped(name),
            Clipped(version)
        )))
    }
}

/// Whether clients are to send requests; else why not.
pub(crate) fn ready(router: &Router, name: &str, model: &Route) -> Result<(), String> {
    if router.is_drained(name) {
        return Err("the model is drained".to_owned());
    }
    model.ready()
}

pub(crate) fn metadata(pipeline: &Route, name: &str) -> Result<Arc<Metadata>, RequestError> {
    pipeline.metadata().ok_or_else(|| {
        let why = pipeline.ready().err().unwrap_or_else(|| "the model is still loading".to_owned());
        RequestFailure::Unavailable(format!("model '{}' is not ready: {why}", Clipped(name))).into()
    })
}

/// Returns the outputs as they are wanted. `reserved` carries their delivery.
pub(crate) async fn infer(
    front: &Frontend,
    pipeline: &Route,
    metadata: &Arc<Metadata>,
    request: InferRequest,
    (peer, coming): (&Peer, RequestArrival),
    reserved: &Reserved,
) -> Result<Vec<Answered>, RequestError> {
    if metadata.streams.is_some() {
        let name = &metadata.name;
        let why = format!("model '{name}' gives many answers to a request; use gRPC's ModelStreamInfer");
        return Err(RequestError::Unsupported(why));
    }
    let made = ready_made(front, metadata, request, peer, reserved).await;
    let (inputs, terms, wanted) = count_malformed(pipeline, made)?;
    let (outputs, delivery) = pipeline.infer(inputs, terms, coming).await?;
    reserved.carry(delivery.into());
    wanted.of(metadata, outputs)
}

/// Counts a request that turned out to be at fault itself before the model has seen it.
pub(crate) fn count_malformed<T>(route: &Route, outcome: Result<T, RequestError>) -> Result<T, RequestError> {
    if let Err(RequestError::Failed(RequestFailure::Invalid(_))) = &outcome {
        route.count_malformed();
    }
    outcome
}

/// A request as the pipeline takes it, and what is wanted of its answers.
pub(crate) async fn ready_made(
    front: &Frontend,
    metadata: &Arc<Metadata>,
    mut request: InferRequest,
    peer: &Peer,
    reserved: &Reserved,
) -> Result<(Vec<RequestInput>, RequestOptions, Wanted), RequestError> {
    let order = check::requested(metadata, &request.outputs)?;
    let places = request.outputs.iter().map(|output| &output.place);
    let places = places.map(|place| place.as_ref().map(|place| front.regions.find(peer, place)).transpose());
    let places = places.collect::<Result<_, _>>()?;
    fetch(front, peer, &mut request.inputs, reserved)?;
    let inputs = checked(metadata, request.inputs).await?;
    Ok((inputs, request.terms, Wanted { order, places }))
}

/// Which outputs a client wants, and where.
pub(crate) struct Wanted {
    /// Their places among the model's outputs.
    order: Vec<usize>,
    /// In this order; outputs beyond them, and those without one, go into the answer.
    places: Vec<Option<Found>>,
}

impl Wanted {
    /// An answer, as its client wants it.
    pub(crate) fn of(
        &self,
        metadata: &Metadata,
        outputs: Vec<RequestOutput>,
    ) -> Result<Vec<Answered>, RequestError> {
        if outputs.len() != metadata.outputs.len() {
            let (expected, got) = (metadata.outputs.len(), outputs.len());
            let why = format!("the model has {expected} outputs, but its answer has {got}");
            return Err(RequestFailure::Internal(why).into());
        }
        let mut outputs: Vec<_> = outputs.into_iter().map(Some).collect();
        let mut answered = Vec::new();
        for (order, &index) in self.order.iter().enumerate() {
            let (spec, output) = (&metadata.outputs[index], outputs[index].take());
            let Some(RequestOutput { shape, data }) = output else { continue };
            let found = self.places.get(order).and_then(Option::as_ref);
            let data = match found {
                Some(found) => {
                    found.write(&spec.name, &data)?;
                    Bytes::new()
                }
                None => data,
            };
            let (name, placed) = (spec.name.clone(), found.is_some());
            answered.push(Answered { name, datatype: spec.datatype, shape, data, placed });
        }
        Ok(answered)
    }
}

async fn checked(
    metadata: &Arc<Metadata>,
    tensors: Vec<NamedTensor>,
) -> Result<Vec<RequestInput>, RequestFailure> {
    let one_by_one = |tensor: &&NamedTensor| matches!(tensor.datatype, Datatype::Bool | Datatype::Bytes);
    if tensors.iter().filter(one_by_one).map(|tensor| tensor.data.len()).sum::<usize>() <= QUICK_BYTES {
        return check::check(metadata, tensors);
    }
    let metadata = Arc::clone(metadata);
    away("checking the tensors", move || check::check(&metadata, tensors)).await
}

/// In the answer.
pub(crate) fn bytes(outputs: &[Answered]) -> usize {
    outputs.iter().map(|output| output.data.len()).sum()
}

/// All inputs in shared memory together are bounded as if they had been sent, for a short request
/// may name the same region many times.
fn fetch(
    front: &Frontend,
    peer: &Peer,
    inputs: &mut [NamedTensor],
    reserved: &Reserved,
) -> Result<(), RequestError> {
    let mut left = front.request_bytes as u64;
    for input in inputs {
        let Some(place) = &input.place else { continue };
        left = left.checked_sub(place.byte_size).ok_or_else(|| {
            let limit = front.request_bytes;
            RequestError::TooLarge(format!(
                "the request names more than {limit} bytes (limits.request_bytes)"
            ))
        })?;
        input.data = front.regions.find(peer, place)?.read(reserved)?.into();
    }
    Ok(())
}
