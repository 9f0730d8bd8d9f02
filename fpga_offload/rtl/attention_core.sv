// Attention of one KV head and its G query heads: a stream of rows in, an unnormalised partial out.
//
// Rows come one beat of LANES elements a cycle, D / LANES beats each, in the order K0 K1 V0 K2 V1 ...
// of blocks of 1 to BLOCK rows. K of the block behind hides the softmax of the block before.
// Accumulators: the adders' own pipelines, eight sums a lane, 8 LANES / D of them for each element.
`default_nettype none
module attention_core #(parameter LANES = 32, parameter D = 128, parameter G = 1, parameter LB = 7) (
    input  wire                clk,
    input  wire                rst,
    input  wire                start,
    input  wire                bf16,
    input  wire [32*G-1:0]     score_scale,    // of the scores, by head: in base 2 where values follow
    input  wire                q_valid,        // one beat of queries, all heads one after another
    input  wire [16*LANES-1:0] q_data,
    input  wire                row_valid,      // a whole row waits
    input  wire                row_is_value,
    input  wire                row_last,       // of its block
    output wire                row_beat,       // a beat of it is taken
    input  wire [16*LANES-1:0] row_data,
    input  wire                finish,         // no row is left
    output wire                idle,
    output wire                score_valid,    // one token's, in order
    output wire [32*G-1:0]     scores,
    output reg  [32*G-1:0]     l,              // with the first beat of the partial
    output reg                 out_valid,
    input  wire                out_ready,
    output wire                out_last,
    output wire [511:0]        out_data
);
    localparam NB = D / LANES;
    localparam LNB = $clog2(NB);
    localparam SETTLE = 24;                    // from the last beat of V to its place in a sum, and more
    localparam [2:0] IDLE = 0, CLEAR = 1, RUN = 2, RESCALE = 3, FOLD = 4, FETCH = 5, SEND = 6;

    reg [2:0] state;
    reg [2:0] phase;                           // of the circulating sums
    reg [6:0] timer;
    reg [LNB:0] beats_left;
    reg is_value;                              // of the row that is being taken
    reg value_open;                            // sums are scaled for the block of V at the input
    reg value_bank;
    reg [1:0] p_blocks;                        // whose p is there
    reg [LB:0] row;                            // within its block
    wire row_phase = (phase & 3'(NB - 1)) == 0;
    wire take = state == RUN && row_phase && row_valid && beats_left == 0 && (!row_is_value || value_open);
    wire [LNB-1:0] beat = take ? {LNB{1'b0}} : LNB'(NB - beats_left);
    wire row_end = beats_left == 1;
    assign row_beat = take || beats_left != 0;
    assign idle = state == IDLE;

    // Lengths of blocks of K whose scores are on the way: at most two.
    reg [LB:0] length0, length1;
    reg [1:0] lengths;
    wire length_taken, p_done, seen;
    wire key_end = row_end && !row_is_value && row_last;
    wire value_end = row_end && row_is_value && row_last;
    wire value_waits = state == RUN && row_valid && beats_left == 0 && row_is_value && !value_open;
    wire open_value = value_waits && p_blocks != 0;
    wire [9*G-1:0] shift;
    reg [9*G-1:0] shifts0, shifts1;            // by bank
    reg p_bank_done;
    wire [9*G-1:0] now_shift = value_bank ? shifts1 : shifts0;
    always @(posedge clk) begin
        phase <= phase + 1'b1;
        if (rst || start) begin
            lengths <= 0;
            p_blocks <= 0;
            row <= 0;
            beats_left <= 0;
            value_open <= 0;
            value_bank <= 0;
            p_bank_done <= 0;
        end else begin
            if (take) beats_left <= NB - 1;
            else if (beats_left != 0) beats_left <= beats_left - 1'b1;
            if (row_end) row <= row_last ? 0 : row + 1'b1;
            if (length_taken) length0 <= length1;
            if (key_end) begin
                if (lengths - length_taken == 0) length0 <= row + 1'b1;
                else length1 <= row + 1'b1;
            end
            lengths <= lengths + key_end - length_taken;
            if (p_done) begin
                if (p_bank_done) shifts1 <= shift; else shifts0 <= shift;
                p_bank_done <= !p_bank_done;
            end
            p_blocks <= p_blocks + p_done - open_value;
            if (open_value && now_shift == 0) value_open <= 1;
            if (state == RESCALE && timer == 20) value_open <= 1;
            if (value_end) begin
                value_open <= 0;
                value_bank <= !value_bank;
            end
        end
    end

    // States, and the way of the sums out.
    localparam GW = G > 1 ? $clog2(G) : 1;
    reg [GW-1:0] out_head;
    reg [LNB-1:0] out_beat;
    reg out_half, out_tail;
    wire sent = out_valid && out_ready;
    wire fetch_phase = ((phase - 3'd6) & 3'(NB - 1)) == 3'(out_beat);  // 14 cycles behind the input
    wire last_beat = out_beat == NB - 1 && out_head == G - 1;
    assign out_last = out_tail;
    always @(posedge clk) begin
        timer <= timer + 1'b1;
        if (rst) begin
            state <= IDLE;
            out_valid <= 0;
        end else case (state)
            IDLE: if (start) begin state <= CLEAR; timer <= 0; end
            CLEAR: if (timer == 15) state <= RUN;
            RUN: begin
                timer <= 0;
                if (open_value && now_shift != 0) state <= RESCALE;
                else if (finish && beats_left == 0 && !row_valid && lengths == 0) state <= FOLD;
            end
            RESCALE: if (timer == 20) state <= RUN;
            FOLD: if (timer == SETTLE + 40) begin
                state <= FETCH;
                out_head <= 0;
                out_beat <= 0;
                out_half <= 0;
                out_tail <= 0;
            end
            FETCH: if (fetch_phase) begin
                state <= SEND;
                out_valid <= 1;
            end
            SEND: if (sent) begin
                out_half <= !out_half;
                if (out_tail) begin
                    state <= IDLE;
                    out_valid <= 0;
                end else if (out_half) begin
                    if (last_beat) out_tail <= 1;
                    else begin
                        out_valid <= 0;
                        state <= FETCH;
                        out_beat <= out_beat == NB - 1 ? 0 : out_beat + 1'b1;
                        if (out_beat == NB - 1) out_head <= out_head + 1'b1;
                    end
                end
            end
            default: state <= IDLE;
        endcase
    end
    wire clear = state == CLEAR || rst;
    wire scale = state == RESCALE && timer >= 8 && timer < 16;
    wire fold4 = NB <= 4 && state == FOLD && timer >= SETTLE && timer < SETTLE + 8;
    wire fold2 = NB <= 2 && state == FOLD && timer >= SETTLE + 16 && timer < SETTLE + 24;

    // Operands: a beat is captured, then normalised; the query's and p arrive with it.
    reg d_valid, d_value, d_bank, x_valid, x_value, x_first;
    reg [LNB-1:0] d_beat;
    reg [LB-1:0] d_row;
    reg [16*LANES-1:0] d_data;
    wire [19*LANES-1:0] wide, q_wide;
    reg [19*LANES-1:0] x;
    always @(posedge clk) begin
        d_valid <= row_beat && !rst;
        d_value <= row_is_value;
        d_beat <= beat;
        d_data <= row_data;
        d_row <= row[LB-1:0];
        d_bank <= value_bank;
        x <= wide;
        x_valid <= d_valid;
        x_value <= d_value;
        x_first <= d_beat == 0;
    end
    genvar i, g;
    generate for (i = 0; i < LANES; i = i + 1) begin : convert
        stored_to_wide kv(.bf16(bf16), .x(d_data[16*i +: 16]), .y(wide[19*i +: 19]));
        stored_to_wide query(.bf16(bf16), .x(q_data[16*i +: 16]), .y(q_wide[19*i +: 19]));
    end endgenerate
    reg [LNB-1:0] q_beat;
    reg [3:0] q_head;
    always @(posedge clk)
        if (rst || start) begin                    // the next job's come behind its start
            q_beat <= 0;
            q_head <= 0;
        end else if (q_valid) begin
            q_beat <= q_beat == NB - 1 ? 0 : q_beat + 1'b1;
            if (q_beat == NB - 1) q_head <= q_head + 1'b1;
        end

    reg [2:0] product_valid;
    reg [3:0] weighted_valid, weighted_first;
    always @(posedge clk) begin
        product_valid <= rst ? 3'd0 : {product_valid[1:0], x_valid && !x_value};
        weighted_valid <= rst ? 4'd0 : {weighted_valid[2:0], x_valid && x_value};
        weighted_first <= {weighted_first[2:0], x_first};
    end
    wire [32*G-1:0] p, maximum;
    wire [G-1:0] scores_valid;
    assign score_valid = scores_valid[0];
    softmax #(.G(G), .LB(LB)) powers(.clk(clk), .rst(rst), .start(start), .length_valid(lengths != 0),
        .length(length0), .length_taken(length_taken), .score_valid(scores_valid[0]), .score(scores),
        .p_done(p_done), .seen(seen), .shift(shift), .maximum(maximum), .p_bank(d_bank), .p_row(d_row), .p(p));

    wire [32*LANES*G-1:0] sums;
    wire [32*G-1:0] totals;
    generate for (g = 0; g < G; g = g + 1) begin : head
        reg [19*LANES-1:0] queries [0:NB-1];
        reg [19*LANES-1:0] query;
        always @(posedge clk) begin
            if (q_valid && q_head == g) queries[q_beat] <= q_wide;
            query <= queries[d_beat];
        end
        wire [32*LANES-1:0] products;
        wire tree_valid, row_valid_sum;
        wire [31:0] tree_sum, row_sum;
        for (i = 0; i < LANES; i = i + 1) begin : dot
            mul_wide_wide multiply(.clk(clk), .a(x[19*i +: 19]), .b(query[19*i +: 19]), .y(products[32*i +: 32]));
        end
        add_tree #(.N(LANES)) tree(.clk(clk), .rst(rst), .in_valid(product_valid[2]), .x(products),
            .out_valid(tree_valid), .y(tree_sum));
        add_sequence #(.N(NB)) sequence_sum(.clk(clk), .rst(rst), .in_valid(tree_valid), .x(tree_sum),
            .out_valid(row_valid_sum), .y(row_sum));
        zkf_mul #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_PACK(1), .STAGE_OUTPUT(1)) scaling(.clk(clk),
            .rst(rst), .in_valid(row_valid_sum), .a(row_sum), .b(score_scale[32*g +: 32]), .out_valid(scores_valid[g]),
            .y(scores[32*g +: 32]));
        wire [31:0] head_p = p[32*g +: 32];
        wire [8:0] head_shift = now_shift[9*g +: 9];
        for (i = 0; i < LANES; i = i + 1) begin : weigh
            wire [31:0] weighted;
            mul_single_wide multiply(.clk(clk), .p(head_p), .v(x[19*i +: 19]), .y(weighted));
            accumulator sum(.clk(clk), .rst(rst), .clear(clear), .scale(scale), .shift(head_shift),
                .fold4(fold4), .fold2(fold2), .add(weighted_valid[3] ? weighted : 32'd0),
                .sum(sums[32*(LANES*g+i) +: 32]));
        end
        reg [31:0] p1, p2, p3, p4;
        always @(posedge clk) begin
            p1 <= head_p;
            p2 <= p1;
            p3 <= p2;
            p4 <= p3;
        end
        accumulator total(.clk(clk), .rst(rst), .clear(clear), .scale(scale), .shift(head_shift), .fold4(fold4),
            .fold2(fold2), .add(weighted_valid[3] && weighted_first[3] ? p4 : 32'd0), .sum(totals[32*g +: 32]));
    end endgenerate

    // Two beats of a circulating row, and behind the last one m and l.
    reg [32*LANES-1:0] held;
    integer h;
    always @(posedge clk) if (state == FETCH && fetch_phase) begin
        held <= sums[32*LANES*out_head +: 32*LANES];
        if (out_head == 0 && out_beat == 0) l <= totals;
    end
    reg [511:0] tail;
    always @* begin
        tail = 0;
        for (h = 0; h < G; h = h + 1) begin
            tail[32*h +: 32] = seen ? maximum[32*h +: 32] : 32'hff800000;
            tail[256 + 32*h +: 32] = l[32*h +: 32];
        end
    end
    assign out_data = out_tail ? tail : out_half ? held[1023:512] : held[511:0];
endmodule
`default_nettype wire
