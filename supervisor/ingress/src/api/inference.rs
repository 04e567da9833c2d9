//! Inferences, in the part that both protocols share.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::{
    Answers, CountedRefusal, Metadata, RequestArrival, RequestFailure, RequestInput, RequestOptions,
};
use shadowslice_datapath::router::Route;
use shadowslice_datapath::tenants::TenantPlace;
use shadowslice_datapath::trace::Journal;
use shadowslice_shared::tensor::Datatype;

use super::frontend::Frontend;
use crate::admission::{BudgetShare, Deliveries, MemoryPermit, RequestError, run_blocking};
use crate::tensors::{InferRequest, NamedTensor, OutputSelection, OutputTensor, check_inputs};

/// The size of elements that are checked one by one, in bytes, that takes a millisecond.
const QUICK_BYTES: usize = 256 << 10;

/// The size of JSON in bytes from which it is parsed on another thread, and the size of tensors
/// from which they are written as JSON on another thread.
pub(super) const LONG_JSON_BYTES: usize = 256 * 1024;

/// The model of an inference.
pub(super) struct Target {
    pub(super) name: String,
    pub(super) route: Route,
    pub(super) metadata: Arc<Metadata>,
}

/// A request in the form that a pipeline accepts, and the outputs that its client wants.
pub(super) struct CheckedRequest {
    /// The client's name for the request.
    pub(super) id: String,
    pub(super) inputs: Vec<RequestInput>,
    pub(super) options: RequestOptions,
    pub(super) outputs: OutputSelection,
    pub(super) place: RequestPlace,
}

/// The place of a request among the requests in flight.
pub(super) struct RequestPlace {
    _host: BudgetShare,
    /// The place among those of the tenant. `None` if there is only one tenant without limits.
    tenant: Option<TenantPlace>,
}

impl RequestPlace {
    /// Records that the model answered the request.
    pub(super) fn mark_answered(&self) {
        if let Some(tenant) = &self.tenant {
            tenant.mark_answered();
        }
    }
}

/// The outputs of a request, which keeps its place until its answer has been built.
pub(super) struct InferenceAnswer {
    pub(super) id: String,
    pub(super) outputs: Vec<OutputTensor>,
    pub(super) _place: RequestPlace,
}

/// One of the answers to a request.
pub(super) struct ModelAnswer {
    pub(super) outputs: Vec<OutputTensor>,
    pub(super) deliveries: Deliveries,
}

/// The answers to a request. They end after a failure. The request keeps its place among the requests
/// in flight until the answers are dropped, which closes the stream in the worker.
pub(super) type ModelAnswers = BoxStream<'static, Result<ModelAnswer, RequestError>>;

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
            journal.set_model(&name, route.pipeline().version());
            id.into_iter().for_each(|id| journal.set_id(id));
        }
        let metadata = route.pipeline().metadata_or_refuse(journal)?;
        Ok(Self { name, route, metadata })
    }

    /// Takes a place among the requests in flight, and parses and checks a request. Reads its inputs
    /// from shared memory. A malformed request counts, and the model does not receive it.
    pub(super) async fn receive(
        &self,
        front: &Frontend,
        peer: &Peer,
        arrival: &RequestArrival,
        permit: &MemoryPermit,
        parse: impl Future<Output = Result<InferRequest, RequestError>>,
    ) -> Result<CheckedRequest, RequestError> {
        let (pipeline, journal) = (self.route.pipeline(), arrival.journal.as_ref());
        let refused = |why| pipeline.count_refused_arrival(why, journal);
        let tenant =
            front.membership.admit(arrival.tenant).inspect_err(|_| refused(CountedRefusal::TenantLimit))?;
        let host = permit.client().admit().inspect_err(|_| refused(CountedRefusal::HostFull))?;
        let place = RequestPlace { _host: host, tenant };
        let checked = async {
            let mut request = parse.await?;
            if let Some(journal) = journal {
                journal.set_id(&request.id);
            }
            let outputs = OutputSelection::new(&self.metadata, &request, &front.regions, peer)?;
            read_shared_inputs(front, peer, &mut request.inputs, permit)?;
            let inputs = check_tensors(&self.metadata, request.inputs).await?;
            Ok(CheckedRequest { id: request.id, inputs, options: request.options, outputs, place })
        };
        let checked = checked.await;
        if let Err(RequestError::Failed(RequestFailure::Invalid(_))) = &checked {
            pipeline.count_malformed();
        }
        checked
    }

    /// Runs a request with a single answer. `permit` receives the delivery of the outputs.
    pub(super) async fn infer(
        &self,
        request: CheckedRequest,
        arrival: RequestArrival,
        permit: &MemoryPermit,
    ) -> Result<InferenceAnswer, RequestError> {
        if self.metadata.streams.is_some() {
            let name = &self.metadata.name;
            let why = format!(
                "model '{name}' gives many answers to a request; use generate_stream, or gRPC's ModelStreamInfer"
            );
            return Err(RequestError::Unsupported(why));
        }
        let CheckedRequest { id, inputs, options, outputs: selection, place } = request;
        let (outputs, delivery) = self.route.infer(inputs, options, arrival).await?.into_single();
        place.mark_answered();
        permit.add_deliveries(delivery.into());
        Ok(InferenceAnswer { id, outputs: selection.select(&self.metadata, outputs)?, _place: place })
    }

    /// Runs a request, and returns its answers when the first one has arrived. Drops the route,
    /// because a stream that kept it would keep the model from moving or being replaced.
    pub(super) async fn open(
        self,
        request: CheckedRequest,
        arrival: RequestArrival,
    ) -> Result<ModelAnswers, RequestError> {
        let CheckedRequest { inputs, options, outputs: selection, place, .. } = request;
        let answers = self.route.infer(inputs, options, arrival).await?;
        place.mark_answered();
        let open = OpenAnswers { answers, selection, metadata: self.metadata, _place: place };
        let next = |mut open: OpenAnswers| async { Ok(open.next().await?.map(|answer| (answer, open))) };
        Ok(stream::try_unfold(open, next).boxed())
    }
}

/// The answers of a model that have not arrived.
struct OpenAnswers {
    answers: Answers,
    selection: OutputSelection,
    metadata: Arc<Metadata>,
    _place: RequestPlace,
}

impl OpenAnswers {
    async fn next(&mut self) -> Result<Option<ModelAnswer>, RequestError> {
        let Some(outputs) = self.answers.next().await.transpose()? else { return Ok(None) };
        let deliveries = Deliveries::from(self.answers.delivery());
        match self.selection.select(&self.metadata, outputs) {
            Ok(outputs) => Ok(Some(ModelAnswer { outputs, deliveries })),
            Err(why) => {
                deliveries.mark_failed(&why);
                Err(why)
            }
        }
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
