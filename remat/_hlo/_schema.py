"""The few fields of XLA's `HloProto` that are read, as protobuf message classes.

No Python package ships these classes without TensorFlow, so they are built from one
table. Names and numbers are those of XLA's `xla/service/hlo.proto` and
`xla/xla_data.proto`; every field left out is skipped by the parser.
"""

from typing import Any

from remat._report._proto import message_class

_SCHEMA = """
HloProto: hlo_module=1 HloModule, buffer_assignment=3 BufferAssignment
HloModule: name=1 string, entry_computation_name=2 string, *computations=3 Computation,
  id=5 int64, entry_computation_id=6 int64, schedule=7 Schedule,
  input_output_alias=8 InputOutputAlias, device_assignment=15 DeviceAssignment,
  stack_frame_index=17 StackFrameIndex
Computation: name=1 string, *instructions=2 Instruction, id=5 int64, root_id=6 int64,
  execution_thread=8 string
Instruction: name=1 string, opcode=2 string, shape=3 Shape, metadata=7 Metadata,
  literal=8 Literal, parameter_number=9 int64, fusion_kind=11 string,
  tuple_index=13 int64, *dimensions=14 int64, window=15 Window,
  convolution_dimension_numbers=16 ConvolutionDimensions,
  *slice_dimensions=17 SliceDimension, *dynamic_slice_sizes=20 int64,
  custom_call_target=28 string, dot_dimension_numbers=30 DotDimensions,
  *gather_slice_sizes=34 int64, id=35 int64, *operand_ids=36 int64,
  *called_computation_ids=38 int64, backend_config=43 bytes,
  *replica_groups=49 ReplicaGroup, feature_group_count=50 int64,
  batch_group_count=58 int64, comparison_direction=63 string,
  *output_operand_aliasing=74 OutputOperandAliasing,
  collective_device_list=87 CollectiveDeviceList,
  ragged_dot_dimension_numbers=90 RaggedDotDimensions,
  mesh_axes_replica_groups=93 MeshAxesReplicaGroups
DeviceAssignment: replica_count=1 int32, computation_count=2 int32
Metadata: op_type=1 string, op_name=2 string, source_file=3 string,
  source_line=4 int32, stack_frame_id=15 int32
Shape: element_type=2 int32, *dimensions=3 int64, *tuple_shapes=4 Shape, layout=5 Layout
Layout: *minor_to_major=1 int64, element_size_in_bits=7 int64, memory_space=8 int64
Literal: shape=1 Shape, *preds=2 bool, u8s=3 bytes, *s32s=4 int32, *s64s=5 int64,
  *u32s=6 uint32, *u64s=7 uint64, s8s=15 bytes, u16s=16 bytes, s16s=17 bytes
Window: *dimensions=1 WindowDimension
WindowDimension: size=1 int64, stride=2 int64, padding_low=3 int64,
  padding_high=4 int64, window_dilation=5 int64, base_dilation=6 int64,
  window_reversal=7 bool
ConvolutionDimensions: kernel_input_feature_dimension=3 int64,
  kernel_output_feature_dimension=4 int64, *kernel_spatial_dimensions=6 int64,
  input_batch_dimension=7 int64, input_feature_dimension=8 int64,
  output_batch_dimension=9 int64, output_feature_dimension=10 int64,
  *input_spatial_dimensions=11 int64, *output_spatial_dimensions=12 int64
SliceDimension: start=1 int64, limit=2 int64, stride=3 int64
DotDimensions: *lhs_contracting_dimensions=1 int64, *rhs_contracting_dimensions=2 int64,
  *lhs_batch_dimensions=3 int64, *rhs_batch_dimensions=4 int64
RaggedDotDimensions: dot_dimension_numbers=1 DotDimensions,
  *lhs_ragged_dimensions=2 int64, *rhs_group_dimensions=3 int64
ReplicaGroup: *replica_ids=1 int64
IotaReplicaGroupList: num_replica_groups=1 int64, num_devices_per_group=2 int64
CollectiveDeviceList: *replica_groups=1 ReplicaGroup,
  iota_replica_group_list=2 IotaReplicaGroupList
MeshAxesReplicaGroups: mesh=1 Mesh, *axes=2 AxisRef
Mesh: *axes=1 MeshAxis
MeshAxis: name=1 string, size=2 int64
AxisRef: mesh_axis_index=1 int64, sub_axis=2 SubAxis
SubAxis: pre_size=1 int64, size=2 int64
OutputOperandAliasing: *output_shape_index=1 int64, operand_index=2 int64,
  *operand_shape_index=3 int64
Schedule: *sequences=1 SequenceEntry
SequenceEntry: key=1 int64, value=2 InstructionSequence
InstructionSequence: *instruction_ids=1 int64
InputOutputAlias: *entries=1 AliasEntry
AliasEntry: *output_shape_index=1 int64, parameter_number=2 int64,
  *parameter_shape_index=3 int64, kind=4 int32
StackFrameIndex: *file_names=1 string, *function_names=2 string,
  *file_locations=3 FileLocation, *stack_frames=4 StackFrame
FileLocation: file_name_id=1 int32, function_name_id=2 int32, line=3 int32
StackFrame: file_location_id=1 int32, parent_frame_id=2 int32
BufferAssignment: *logical_buffers=1 LogicalBuffer, *buffer_allocations=3 Allocation,
  *heap_simulator_traces=4 HeapTrace
LogicalBuffer: id=1 int64, size=2 int64, defined_at=3 Location, color=4 int64
Location: instruction_name=2 string, *shape_index=3 int64, instruction_id=4 int64
Allocation: index=1 int64, size=2 int64, is_thread_local=3 bool,
  is_entry_computation_parameter=5 bool, parameter_number=6 int64,
  maybe_live_out=7 bool, color=8 int64, *assigned=9 Assigned,
  *parameter_shape_index=10 int64, is_tuple=11 bool, is_constant=12 bool
Assigned: logical_buffer_id=1 int64, offset=2 int64, size=3 int64
HeapTrace: *events=1 HeapEvent, whole_module_simulation=2 bool,
  buffer_allocation_index=3 int64
HeapEvent: kind=1 int32, buffer_id=2 int64, computation_name=3 string,
  instruction_name=4 string, share_with_canonical_id=5 int64
"""

HloProto: Any = message_class(_SCHEMA, "remat.xla", "HloProto")
